// Stands in for libstdc++.so.6 when a module is linked that is to take exceptions from it, by a compiler that has
// another C++ library. It has the names of what is taken, does nothing, and is not installed.
extern "C" {
void __cxa_begin_catch() {}
void __cxa_end_catch() {}
void __gxx_personality_v0() {}
void _Unwind_Resume() {}
void _ZSt9terminatev() {}
void _ZdlPv() {}
}
