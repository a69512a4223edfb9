// Every operator of a CUDA tensor, computed by the CPU's kernel on the same memory's contents. See __init__.py.
//
// Loaded into a process by runtime.cpp once torch asks for the number of devices. Views and allocations keep
// torch's own kernels, which launch nothing.
#include <ATen/Context.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from_and_resize.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <vector>

namespace {
thread_local int depth = 0;

struct Quiet : c10::WarningHandler {
  void process(const c10::Warning &) override {}
};

at::Tensor on_cpu(const at::Tensor &tensor) {
  if (!tensor.is_cuda()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// The order of work on a stream is kept, except that nothing waits for torch.cuda._sleep but copies.
at::Tensor &copy(at::Tensor &self, const at::Tensor &source, bool non_blocking) {
  bool waits = !(self.is_cuda() && source.is_cuda()) && !non_blocking && depth == 0;
  if (waits && c10::cuda::warning_state().get_sync_debug_mode() != c10::cuda::SyncDebugMode::L_DISABLED)
    c10::cuda::warn_or_error_on_sync();
  if (waits) c10::cuda::getCurrentCUDAStream().synchronize();
  on_cpu(self).copy_(on_cpu(source).expand_as(self));
  return self;
}

at::Tensor copy_and_resize(const at::Tensor &self, const at::Tensor &target) {
  target.resize_(self.sizes());
  return target.copy_(self);
}

// The CPU's generator in the state that the seed and offset of the device's name.
struct RandomNumbers {
  at::Generator cpu = at::globalContext().defaultGenerator(at::kCPU);
  at::Generator cuda;
  at::Tensor before;

  explicit RandomNumbers(torch::jit::Stack *stack, size_t num_arguments) {
    cuda = at::globalContext().defaultGenerator(c10::Device(at::kCUDA, c10::cuda::current_device()));
    for (size_t i = stack->size() - num_arguments; i < stack->size(); ++i) {
      c10::IValue &value = (*stack)[i];
      if (!value.isGenerator()) continue;
      if (value.toGenerator().device().is_cuda()) cuda = value.toGenerator();
      value = c10::IValue();
    }
    before = cpu.get_state();
    cpu.set_current_seed(cuda.current_seed() * 0x9E3779B97F4A7C15ULL + cuda.get_offset());
    cuda.set_offset(cuda.get_offset() + 4);
  }
  ~RandomNumbers() { cpu.set_state(before); }
};

void compute(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  std::unique_ptr<RandomNumbers> random;
  if (op.hasTag(at::Tag::nondeterministic_seeded))
    random = std::make_unique<RandomNumbers>(stack, op.schema().arguments().size());
  struct Deeper {
    Deeper() { ++depth; }
    ~Deeper() { --depth; }
  } deeper;
  at::native::cpu_fallback(op, stack);
}

const std::set<std::string> native = {
    "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::record_stream", "aten::_pin_memory",
    "aten::is_pinned", "aten::_local_scalar_dense", "aten::is_set_to", "aten::_reshape_alias", "aten::as_strided",
    "aten::_efficientzerotensor", "aten::copy_", "aten::_copy_from_and_resize",
};

bool is_view(const c10::FunctionSchema &schema) {
  for (const auto &each : schema.returns())
    if (each.alias_info() && !each.alias_info()->isWrite()) return true;
  return false;
}

// Convolutions and attention have operators of cuDNN and of CUDA alone, chosen before the kernels of the device.
struct Registration {
  std::vector<c10::RegistrationHandleRAII> kept;
  torch::Library own{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};

  Registration() {
    Quiet quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    auto &dispatcher = c10::Dispatcher::singleton();
    std::set<c10::OperatorName> names;
    auto found = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
    for (const auto &name : found) {
      auto op = dispatcher.findSchema(name);
      if (!op || name.name.rfind("aten::", 0) || native.count(name.name) || is_view(op->schema())) continue;
      add(name);
    }
    add({"aten::convolution", ""});
    add({"aten::convolution_backward", ""});
    own.impl("copy_", &copy);
    own.impl("_copy_from_and_resize", &copy_and_resize);
    auto &context = at::globalContext();
    context.setUserEnabledCuDNN(false);
    context.setSDPUseFlash(false);
    context.setSDPUseMemEfficient(false);
    context.setSDPUseCuDNN(false);
  }
  void add(const c10::OperatorName &name) {
    kept.push_back(c10::Dispatcher::singleton().registerImpl(
        name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&compute>(), std::nullopt, nullptr,
        "fake_cuda"));
  }
};

// Never destroyed: threads may compute until the process ends.
[[maybe_unused]] Registration *registration = new Registration;
}  // namespace
