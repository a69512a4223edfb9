// A CUDA runtime whose devices are this process's memory. See __init__.py.
//
// Interposed with LD_PRELOAD on libcudart; its soname also stands for libcuda.so.1. Everything completes at once,
// except after torch.cuda._sleep, and while the file FAKE_CUDA_HANGS exists. A launch of any other kernel fails:
// operators.cpp computes on the CPU.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace {
struct Block {
  size_t size;
  cudaMemoryType type;
  int device;
};
struct Stream {
  std::atomic<double> busy_until{0};
  int priority = 0;
};
struct Event {
  std::atomic<double> ready_at{0};
};
std::mutex mutex;
std::map<char *, Block> blocks;
size_t used[64];
Stream default_streams[64];
bool has_context[64];
const void *sleep_kernel;
thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;

int number(const char *name, int otherwise) {
  const char *value = getenv(name);
  return value && *value ? atoi(value) : otherwise;
}
size_t total_bytes() { return size_t(number("FAKE_CUDA_MIB", 4096)) << 20; }
bool exists(const char *name) {
  const char *path = getenv(name);
  return path && access(path, F_OK) == 0;
}
// The devices of this node; one is lost where FAKE_CUDA_LOST-<node> exists.
int num_devices() {
  const char *path = getenv("FAKE_CUDA_LOST"), *node = getenv("SLURMD_NODENAME");
  bool lost = path && node && access((std::string(path) + "-" + node).c_str(), F_OK) == 0;
  return number("FAKE_CUDA_DEVICES", 1) - lost;
}
double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}
cudaError_t state() { return last = exists("FAKE_CUDA_FAILS") ? cudaErrorECCUncorrectable : cudaSuccess; }
bool is_ready(double at) { return now() >= at && !exists("FAKE_CUDA_HANGS"); }
cudaError_t wait(double at) {
  has_context[current] = true;
  while (!is_ready(at)) usleep(1000);
  return state();
}
cudaError_t query(double at) {
  has_context[current] = true;
  if (state() != cudaSuccess) return last;
  return is_ready(at) ? cudaSuccess : cudaErrorNotReady;
}
Stream *of(cudaStream_t stream) {
  has_context[current] = true;
  return uintptr_t(stream) > 2 ? reinterpret_cast<Stream *>(stream) : &default_streams[current];
}
Event *of(cudaEvent_t event) { return reinterpret_cast<Event *>(event); }
cudaError_t allocate(void **out, size_t size, cudaMemoryType type) {
  if (state() != cudaSuccess) return last;
  std::lock_guard guard(mutex);
  bool on_device = type == cudaMemoryTypeDevice;
  if (on_device && used[current] + size > total_bytes()) return last = cudaErrorMemoryAllocation;
  has_context[current] = true;
  *out = aligned_alloc(512, (size + 511) & ~size_t(511));
  blocks[static_cast<char *>(*out)] = {size, type, current};
  if (on_device) used[current] += size;
  return cudaSuccess;
}
cudaError_t release(void *pointer, bool is_ours) {
  std::lock_guard guard(mutex);
  auto found = blocks.find(static_cast<char *>(pointer));
  if (found == blocks.end()) return pointer ? last = cudaErrorInvalidValue : cudaSuccess;
  if (found->second.type == cudaMemoryTypeDevice) used[found->second.device] -= found->second.size;
  if (is_ours) free(pointer);
  blocks.erase(found);
  return cudaSuccess;
}
double all_ready() {
  return default_streams[current].busy_until;  // torch's own streams are synchronized one by one
}
}  // namespace

extern "C" {
cudaError_t cudaGetDeviceCount(int *count) {
  static std::once_flag once;
  std::call_once(once, [] {
    Dl_info self;
    dladdr(reinterpret_cast<void *>(&cudaGetDeviceCount), &self);
    std::string path = self.dli_fname;
    path = path.substr(0, path.rfind('/')) + "/operators.so";
    if (!dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
      fprintf(stderr, "fake_cuda: %s\n", dlerror());
      abort();
    }
  });
  *count = num_devices();
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible) *count = !*visible || *visible == '-' ? 0 : std::min<int>(*count, 1 + std::count(visible, visible + strlen(visible), ','));
  return *count ? cudaSuccess : last = cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return last = cudaErrorInvalidDevice;
  current = device;
  has_context[device] = true;
  return exists("FAKE_CUDA_BUSY") ? last = cudaErrorDevicesUnavailable : state();
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  const char *name = getenv("FAKE_CUDA_NAME");
  strncpy(properties->name, name ? name : "H100 (stand-in)", sizeof properties->name - 1);
  properties->uuid.bytes[15] = char(device + 1);
  properties->totalGlobalMem = total_bytes();
  properties->major = number("FAKE_CUDA_MAJOR", 9);
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = 49152;
  properties->regsPerMultiprocessor = 65536;
  properties->l2CacheSize = 50 << 20;
  properties->pciBusID = device + 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) { return *value = 0, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) {
  return snprintf(id, size_t(size), "0000:%02x:00.0", device + 1), cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  if (state() != cudaSuccess) return last;
  size_t others = size_t(number("FAKE_CUDA_OTHERS_MIB", 0)) << 20;
  *total = total_bytes();
  *free_bytes = *total - std::min(*total, used[current] + others);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return wait(all_ready()); }

cudaError_t cudaMalloc(void **out, size_t size) { return allocate(out, size, cudaMemoryTypeDevice); }
cudaError_t cudaHostAlloc(void **out, size_t size, unsigned) { return allocate(out, size, cudaMemoryTypeHost); }
cudaError_t cudaMallocHost(void **out, size_t size) { return allocate(out, size, cudaMemoryTypeHost); }
cudaError_t cudaFree(void *pointer) { return release(pointer, true); }
cudaError_t cudaFreeHost(void *pointer) { return release(pointer, true); }
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned) {
  std::lock_guard guard(mutex);
  has_context[current] = true;
  blocks[static_cast<char *>(pointer)] = {size, cudaMemoryTypeHost, current};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *pointer) { return release(pointer, false); }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *pointer) {
  std::lock_guard guard(mutex);
  char *at = static_cast<char *>(const_cast<void *>(pointer));
  auto next = blocks.upper_bound(at);
  memset(out, 0, sizeof *out);
  out->type = cudaMemoryTypeUnregistered;
  if (next == blocks.begin()) return cudaSuccess;
  auto &[begin, block] = *--next;
  if (at >= begin + block.size) return cudaSuccess;
  out->type = block.type;
  out->device = block.device;
  out->devicePointer = out->hostPointer = at;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind) {
  wait(all_ready());
  return memmove(to, from, size), state();
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  of(stream);
  return memmove(to, from, size), state();
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t) {
  return memmove(to, from, size), state();
}
cudaError_t cudaMemset(void *to, int value, size_t size) { return memset(to, value, size), state(); }
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t) {
  return memset(to, value, size), state();
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int priority) {
  auto made = new Stream;
  made->priority = priority;
  return *stream = reinterpret_cast<cudaStream_t>(made), cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete of(stream), cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  return *priority = of(stream)->priority, cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return query(of(stream)->busy_until); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait(of(stream)->busy_until); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Stream *later = of(stream);
  later->busy_until = std::max<double>(later->busy_until, of(event)->ready_at);
  return state();
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *, cudaGraph_t *,
                                     const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *argument) {
  return function(argument), cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  return *event = reinterpret_cast<cudaEvent_t>(new Event), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete of(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  of(event)->ready_at = std::max<double>(now(), of(stream)->busy_until);
  return state();
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return query(of(event)->ready_at); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return wait(of(event)->ready_at); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
  return *ms = float(1e3 * (of(end)->ready_at - of(start)->ready_at)), cudaSuccess;
}

// The one kernel that runs is that of torch.cuda._sleep; a cycle takes a nanosecond.
void __cudaRegisterFunction(void **fatbin, const char *host, char *device, const char *name, int limit, uint3 *tid,
                            uint3 *bid, dim3 *block, dim3 *grid, int *size) {
  using Register = decltype(&__cudaRegisterFunction);
  static auto real = reinterpret_cast<Register>(dlsym(RTLD_NEXT, "__cudaRegisterFunction"));
  if (strstr(name, "spin_kernel")) sleep_kernel = host;
  real(fatbin, host, device, name, limit, tid, bid, block, grid, size);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  return *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function)), cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **arguments, size_t, cudaStream_t stream) {
  if (function != sleep_kernel) return last = cudaErrorNotSupported;
  Stream *busy = of(stream);
  double seconds = double(*static_cast<int64_t *>(arguments[0])) * 1e-9;
  busy->busy_until = std::max(now(), busy->busy_until.load()) + seconds;
  return state();
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, block, arguments, shared, stream);
}

// The driver: what torch asks of it is whether a process uses a device.
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  return *flags = 0, *active = has_context[device], CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char **text) { return *text = "fake_cuda", CUDA_SUCCESS; }
CUresult fake_cuda_not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }
int cuptiGetResultString(int, const char **text) { return *text = "fake_cuda", 0; }
}
// What else libcaffe2_nvrtc.so and torch's profiler link to; without CUPTI it records the CPU alone.
#define NOT_SUPPORTED(name) asm(".globl " #name "\n.set " #name ", fake_cuda_not_supported");
NOT_SUPPORTED(cuCtxGetCurrent)
NOT_SUPPORTED(cuCtxSetCurrent)
NOT_SUPPORTED(cuDeviceGetAttribute)
NOT_SUPPORTED(cuDevicePrimaryCtxRetain)
NOT_SUPPORTED(cuFuncGetAttribute)
NOT_SUPPORTED(cuFuncSetAttribute)
NOT_SUPPORTED(cuFuncSetCacheConfig)
NOT_SUPPORTED(cuLaunchCooperativeKernel)
NOT_SUPPORTED(cuLaunchKernel)
NOT_SUPPORTED(cuLinkAddData_v2)
NOT_SUPPORTED(cuLinkComplete)
NOT_SUPPORTED(cuLinkCreate_v2)
NOT_SUPPORTED(cuModuleGetFunction)
NOT_SUPPORTED(cuModuleLoad)
NOT_SUPPORTED(cuModuleLoadData)
NOT_SUPPORTED(cuModuleLoadDataEx)
NOT_SUPPORTED(cuModuleUnload)
NOT_SUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_SUPPORTED(cuPointerGetAttribute)
NOT_SUPPORTED(cuTensorMapEncodeTiled)
NOT_SUPPORTED(cuptiActivityDisable)
NOT_SUPPORTED(cuptiActivityEnable)
NOT_SUPPORTED(cuptiActivityEnableCudaEventDeviceTimestamps)
NOT_SUPPORTED(cuptiActivityEnableDriverApi)
NOT_SUPPORTED(cuptiActivityEnableRuntimeApi)
NOT_SUPPORTED(cuptiActivityFlushAll)
NOT_SUPPORTED(cuptiActivityGetNextRecord)
NOT_SUPPORTED(cuptiActivityGetNumDroppedRecords)
NOT_SUPPORTED(cuptiActivityPopExternalCorrelationId)
NOT_SUPPORTED(cuptiActivityPushExternalCorrelationId)
NOT_SUPPORTED(cuptiActivityRegisterCallbacks)
NOT_SUPPORTED(cuptiActivityRegisterTimestampCallback)
NOT_SUPPORTED(cuptiActivitySetAttribute)
NOT_SUPPORTED(cuptiEnableCallback)
NOT_SUPPORTED(cuptiEnableDomain)
NOT_SUPPORTED(cuptiFinalize)
NOT_SUPPORTED(cuptiGetCallbackName)
NOT_SUPPORTED(cuptiGetVersion)
NOT_SUPPORTED(cuptiSubscribe)
NOT_SUPPORTED(cuptiUnsubscribe)
