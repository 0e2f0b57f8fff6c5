// TEST DOUBLE: the functions of CUDA's runtime that the shim stands in front of, over the stand-in for the driver; and with
// them, under names of its own, a caller that is linked to them as torch is.
extern "C" {
int cuEventCreate(void** event, unsigned flags);
int cuEventRecord(void* event, void* stream);
int cuStreamWaitEvent(void* stream, void* event, unsigned flags);

#ifdef CALLER
int cudaEventRecord(void* event, void* stream);
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags);
int cudaGraphLaunch(void* graph, void* stream);
void* caller_event() {
  void* event = nullptr;
  return cuEventCreate(&event, 2) == 0 ? event : nullptr;
}
int caller_cudaEventRecord(void* event, void* stream) { return cudaEventRecord(event, stream); }
int caller_cudaStreamWaitEvent(void* stream, void* event) { return cudaStreamWaitEvent(stream, event, 0); }
int caller_cudaGraphLaunch(void* stream) { return cudaGraphLaunch(nullptr, stream); }
#else
static int g_recorded = 0;
int cudaStandInRecorded() { return g_recorded; }
int cudaEventRecord(void* event, void* stream) { return ++g_recorded, cuEventRecord(event, stream); }
int cudaEventRecordWithFlags(void* event, void* stream, unsigned) { return cuEventRecord(event, stream); }
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) { return cuStreamWaitEvent(stream, event, flags); }
int cudaGraphLaunch(void*, void*) { return 0; }
#endif
}
