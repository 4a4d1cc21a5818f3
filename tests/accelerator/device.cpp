// A device that is an accelerator to torch, with streams and a process group of its own, and lies
// in the host's memory: what would run on a GPU runs here, slowly, where there is none.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <pybind11/chrono.h>

namespace {

using at::IntArrayRef;
using at::Scalar;
using at::Tensor;

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

void release(void* data) { free(data); }

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(bytes == 0 || posix_memalign(&data, 64, bytes) == 0, "out of memory");
    return {data, data, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    memcpy(to, from, bytes);
  }
};

Memory memory;
REGISTER_ALLOCATOR(kType, &memory)

// One stream, on which everything is done at once.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    *event = &memory;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
};

Hooks hooks;

// The same memory as a tensor of the CPU.
Tensor on_cpu(const Tensor& x) {
  if (!x.device().is_privateuseone()) {
    return x;
  }
  auto kept = std::make_shared<c10::Storage>(x.storage());
  auto bytes = at::from_blob(
      kept->mutable_data(), {static_cast<int64_t>(kept->nbytes())}, [kept](void*) {},
      at::TensorOptions().dtype(at::kByte));
  auto found = at::empty({0}, at::TensorOptions().dtype(x.dtype()));
  found.set_(bytes.storage(), x.storage_offset(), x.sizes(), x.strides());
  return found;
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Scalar local_scalar_dense(const Tensor& x) { return at::_local_scalar_dense(on_cpu(x)); }

const Tensor& resize_(
    const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  if (self.sym_sizes() == size) {
    return self;
  }
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  auto needed = (impl->numel() + impl->storage_offset()) * impl->dtype().itemsize();
  auto storage = impl->unsafe_storage();
  if (needed > storage.nbytes()) {
    auto larger = memory.allocate(needed);
    memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(larger));
    storage.set_nbytes(needed);
  }
  return self;
}

Tensor& set_(Tensor& self, at::Storage from, int64_t at, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::set_(self, from, at, size, stride);
}

Tensor& set_whole_(Tensor& self, at::Storage from) {
  auto size = static_cast<int64_t>(from.nbytes() / self.dtype().itemsize());
  return at::cpu::set_(self, from, 0, {size}, {1});
}

Tensor as_strided(
    const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> at) {
  return at::native::as_strided_tensorimpl(self, size, stride, at);
}

Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }

Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

void all_others(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&all_others>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_);
  library.impl("set_.source_Storage", set_whole_);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
}

using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Work = c10::intrusive_ptr<c10d::Work>;

Tensors on_cpu(const Tensors& given) {
  Tensors found;
  for (const auto& x : given) {
    found.push_back(on_cpu(x));
  }
  return found;
}

Lists on_cpu(const Lists& given) {
  Lists found;
  for (const auto& each : given) {
    found.push_back(on_cpu(each));
  }
  return found;
}

// Collectives of the device's tensors by another backend, of the same memory.
struct Collectives final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> host;
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> host)
      : c10d::Backend(host->getRank(), host->getSize()), host(host) {}
  const std::string getBackendName() const override { return "standin"; }
  Work broadcast(Tensors& x, const c10d::BroadcastOptions& how) override {
    auto here = on_cpu(x);
    return host->broadcast(here, how);
  }
  Work allreduce(Tensors& x, const c10d::AllreduceOptions& how) override {
    auto here = on_cpu(x);
    return host->allreduce(here, how);
  }
  Work allgather(Lists& to, Tensors& from, const c10d::AllgatherOptions& how) override {
    auto there = on_cpu(to);
    auto here = on_cpu(from);
    return host->allgather(there, here, how);
  }
  Work _allgather_base(Tensor& to, Tensor& from, const c10d::AllgatherOptions& how) override {
    auto there = on_cpu(to), here = on_cpu(from);
    return host->_allgather_base(there, here, how);
  }
  Work allgather_into_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::AllgatherOptions& how) override {
    auto there = on_cpu(to), here = on_cpu(from);
    return host->allgather_into_tensor_coalesced(there, here, how);
  }
  Work scatter(Tensors& to, Lists& from, const c10d::ScatterOptions& how) override {
    auto there = on_cpu(to);
    auto here = on_cpu(from);
    return host->scatter(there, here, how);
  }
  Work _reduce_scatter_base(
      Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& how) override {
    auto there = on_cpu(to), here = on_cpu(from);
    return host->_reduce_scatter_base(there, here, how);
  }
  Work reduce_scatter_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& how) override {
    auto there = on_cpu(to), here = on_cpu(from);
    return host->reduce_scatter_tensor_coalesced(there, here, how);
  }
  Work alltoall_base(
      Tensor& to, Tensor& from, std::vector<int64_t>& sizes_to, std::vector<int64_t>& sizes_from,
      const c10d::AllToAllOptions& how) override {
    auto there = on_cpu(to), here = on_cpu(from);
    return host->alltoall_base(there, here, sizes_to, sizes_from, how);
  }
  Work send(Tensors& x, int rank, int tag) override {
    auto here = on_cpu(x);
    return host->send(here, rank, tag);
  }
  Work recv(Tensors& x, int rank, int tag) override {
    auto here = on_cpu(x);
    return host->recv(here, rank, tag);
  }
  Work barrier(const c10d::BarrierOptions& how) override { return host->barrier(how); }
  void setTimeout(std::chrono::milliseconds timeout) override { host->setTimeout(timeout); }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  py::class_<Collectives, c10d::Backend, c10::intrusive_ptr<Collectives>>(module, "Collectives")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>())
      .def_property_readonly(
          "options",
          [](const Collectives& self) {
            auto made = py::module_::import("types").attr("SimpleNamespace");
            return made(py::arg("_timeout") = self.host->getBackendOptions()->timeout);
          })
      .def("_set_default_timeout", &Collectives::setTimeout);
}
