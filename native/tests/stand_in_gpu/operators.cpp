// TEST DOUBLE: lets torch's CUDA operators compute on the stand-in, where values matter: an operator runs as ever, which
// allocates, launches and takes its time on the device, and behind its kernels the same operator of the CPU is put on the
// stream, on the same memory. So a host still runs ahead, and what an aborted collective left is what the next kernel reads.
// Loaded by torch.ops.load_library; what has no CPU operator computes nothing, as without this.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdio>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

extern "C" void stand_in_enqueue(void* stream, void (*call)(void*), void (*drop)(void*), void* argument);
extern "C" void stand_in_wait(void* stream);

namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

// Views and memory, which have no values, and what reads the device's memory itself.
const std::unordered_set<std::string> kLeftAlone = {
    "aten::empty", "aten::empty_strided", "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold",
    "aten::resize_", "aten::set_", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::view_as_real",
    "aten::view_as_complex", "aten::_local_scalar_dense", "aten::is_set_to", "aten::_copy_from"};
// The host goes on by their values, so it waits for them.
const std::unordered_set<std::string> kAtOnce = {"aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2"};

std::unordered_map<std::string, c10::SafeKernelFunction>& originals() {
  static auto* all = new std::unordered_map<std::string, c10::SafeKernelFunction>;
  return *all;
}
std::string key_of(const c10::OperatorName& name) { return name.name + "." + name.overload_name; }

thread_local bool t_inside = false;  // an operator that another one calls: the outer one computes

at::Tensor on_host(const at::Tensor& tensor) {  // the same memory
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
}

IValue on_host(const IValue& value, const at::Generator& generator) {
  if (value.isTensor()) return on_host(value.toTensor());
  if (value.isDevice()) return at::Device(at::kCPU);
  if (value.isGenerator()) return generator;
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& one : value.toTensorVector()) all.push_back(on_host(one));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
      all.push_back(one.has_value() ? std::optional<at::Tensor>(on_host(*one)) : std::nullopt);
    return all;
  }
  return value;
}

void put_tensor(const at::Tensor& from, const at::Tensor& to) {
  if (from.defined() && to.defined() && from.data_ptr() != to.data_ptr() && to.numel() > 0) to.copy_(from);
}
void put(const IValue& from, const IValue& to) {
  if (from.isTensor() && to.isTensor()) return put_tensor(from.toTensor(), to.toTensor());
  if (!from.isTensorList() || !to.isTensorList()) return;
  const auto sources = from.toTensorVector(), targets = to.toTensorVector();
  for (std::size_t i = 0; i < targets.size(); ++i) put_tensor(sources[i], targets[i]);
}

struct Pending {
  c10::OperatorHandle op;
  Stack arguments, results;  // on the host, of the device's memory
};

void drop(void* pointer) { delete static_cast<Pending*>(pointer); }

void compute(void* pointer) {
  const auto* pending = static_cast<Pending*>(pointer);
  try {
    Stack stack = pending->arguments;
    pending->op.callBoxed(&stack);
    for (std::size_t i = 0; i < stack.size(); ++i) put(stack[i], pending->results[i]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stand-in: %s computes nothing: %.300s\n", key_of(pending->op.operator_name()).c_str(), error.what());
  }
}

// Random numbers follow the state of the device's generator.
at::Generator generator_for(const Stack& arguments, const c10::FunctionSchema& schema) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (schema.arguments()[i].type()->str().find("Generator") == std::string::npos) continue;
    const at::Generator device = arguments[i].isGenerator() ? arguments[i].toGenerator()
                                                            : at::globalContext().defaultGenerator(at::Device(at::kCUDA, -1));
    return at::detail::createCPUGenerator(device.current_seed() * 0x9e3779b97f4a7c15ULL + device.get_offset());
  }
  return {};
}

// A generator that was left out is the device's default one, and the CPU's would be another.
void name_generator(Stack& arguments, const c10::FunctionSchema& schema, const at::Generator& generator) {
  for (std::size_t i = 0; i < arguments.size() && generator.defined(); ++i)
    if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) arguments[i] = generator;
}

// A host needs seconds for a product of large matrices, such as a validation's, whose values nobody reads.
constexpr std::int64_t kMostElements = 1 << 22;
bool is_large(const std::string& name, const Stack& arguments) {
  return (name == "aten::mm" || name == "aten::_scaled_mm") && arguments[0].toTensor().numel() > kMostElements;
}

bool touches_host(const Stack& arguments) {
  for (const IValue& one : arguments)
    if (one.isTensor() && one.toTensor().defined() && !one.toTensor().is_cuda() && one.toTensor().dim() > 0) return true;
  return false;
}

void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string& name = schema.name();
  const auto original = originals().find(key_of(op.operator_name()));
  const std::size_t count = schema.arguments().size();
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  if (t_inside || is_large(name, arguments) || (name == "aten::copy_" && touches_host(arguments))) return original->second.callBoxed(op, keys, stack);
  void* stream = at::cuda::getCurrentCUDAStream().stream();
  const at::Generator generator = generator_for(arguments, schema);
  const auto hosted = [&](const Stack& values) {
    Stack all;
    for (const IValue& value : values) all.push_back(on_host(value, generator));
    return all;
  };
  if (kAtOnce.count(name) != 0) {
    stand_in_wait(stream);
    torch::jit::drop(*stack, count);
    Stack results = hosted(arguments);
    op.callBoxed(&results);
    for (IValue& value : results)
      stack->push_back(value.isTensor() ? IValue(value.toTensor().to(at::Device(at::kCUDA, -1))) : value);
    return;
  }
  t_inside = true;
  try {
    original->second.callBoxed(op, keys, stack);
  } catch (...) {
    t_inside = false;
    throw;
  }
  t_inside = false;
  const Stack results(stack->end() - static_cast<std::ptrdiff_t>(schema.returns().size()), stack->end());
  auto pending = std::unique_ptr<Pending>(new Pending{op, hosted(arguments), hosted(results)});
  name_generator(pending->arguments, schema, generator);
  stand_in_enqueue(stream, compute, drop, pending.release());
}

// Every operator of torch with a kernel of CUDA's and one for the CPU.
struct Everything {
  Everything() : library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__) {
    auto& dispatcher = c10::Dispatcher::singleton();
    std::vector<c10::OperatorName> names;
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (name.name.rfind("aten::", 0) != 0 || kLeftAlone.count(name.name) != 0) continue;
      const auto op = dispatcher.findSchema(name);
      if (!op.has_value() || !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
      if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && name.name != "aten::copy_") continue;
      originals().emplace(key_of(name), op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA));
      names.push_back(name);
    }
    const c10::WarningUtils::WarningHandlerGuard quiet(&silent);  // that a kernel is replaced
    for (const c10::OperatorName& name : names) {
      const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&call>());
    }
  }
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  torch::Library library;
};
const auto* const everything = new Everything;

}  // namespace
