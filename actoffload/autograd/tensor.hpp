// PyTorch's tensors, read and made through its C++ headers instead of its Python methods.
//
// Only plain tensors: dense, strided, of PyTorch's own two types, outside of every mode, transform and inference. Python
// looks at all others.

#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>
#include <exception>
#include <new>

#include "python.hpp"

// Declared here because PyTorch's headers for them take several times as long to compile. The libraries are loaded.
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
namespace torch::autograd {
int get_current_graph_task_id();
}

namespace {

// Where a tensor lies in its Python object. No header of PyTorch's that a C++ program may rely on says that, so it is
// found in samples: behind the head of the object; or, before PyTorch 2.10, one word further, behind a flag that is set
// where the object only borrows the tensor.
class TensorPlace {
 public:
  // Whether the tensor of a sample, which says its address as `_cdata`, lies where those before it do.
  bool find(PyObject* sample) {
    const Ref told(PyObject_GetAttrString(sample, "_cdata"));
    const long long address = told ? PyLong_AsLongLong(told.get()) : -1;
    if (PyErr_Occurred() != nullptr) {
      return false;
    }
    for (const std::ptrdiff_t behind : {std::ptrdiff_t{0}, kBehindFlag}) {
      long long there = 0;
      std::memcpy(&there, after_head(sample) + behind, sizeof there);
      if (there == address && (behind == 0 || !borrowed(sample)) && (behind_ < 0 || behind_ == behind)) {
        behind_ = behind;
        return true;
      }
    }
    PyErr_SetString(PyExc_TypeError, "this release of PyTorch lays out its objects otherwise");
    return false;
  }

  // Null where the object only borrows its tensor.
  const at::TensorBase* in(PyObject* object) const {
    if (behind_ != 0 && borrowed(object)) {
      return nullptr;
    }
    return reinterpret_cast<const at::TensorBase*>(after_head(object) + behind_);
  }

 private:
  static constexpr std::ptrdiff_t kBehindFlag = sizeof(void*);
  static const char* after_head(PyObject* object) { return reinterpret_cast<const char*>(object + 1); }
  static bool borrowed(PyObject* object) { return *after_head(object) != 0; }

  std::ptrdiff_t behind_ = -1;  // not known yet
};

// Calls C++ of PyTorch's, which may throw; false with Python's error if it does.
template <typename Work>
bool guarded(Work work) noexcept {
  try {
    work();
    return true;
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    if (PyErr_Occurred() == nullptr) {  // else it is Python's error that came through C++
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "PyTorch threw something that is no exception");
  }
  return false;
}

const std::uint64_t kPlainKeys =
    c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU}).raw_repr() &
    ~c10::full_backend_mask;
const std::uint64_t kIgnoredKeys = c10::full_backend_mask | c10::autocast_dispatch_keyset.raw_repr();

// By its dispatch keys a plain tensor is dense and of any backend. It is not conjugate, negative, zero, quantized, nested,
// sparse, wrapped by a transform, made in inference, nor a subclass with `__torch_dispatch__`.
bool is_plain(const c10::TensorImpl* impl) {
  return (impl->key_set().raw_repr() & ~kIgnoredKeys) == kPlainKeys && impl->device_type() != c10::kMeta &&
         impl->has_storage() && !impl->has_symbolic_sizes_strides() && impl->version_counter().enabled();
}

// Whether no mode and no transform watches this thread, so that nobody misses what is done past PyTorch's dispatcher.
bool no_mode() { return c10::impl::tls_local_dispatch_key_set().included_ == c10::default_included_set; }

c10::StorageImpl* storage_of(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

long long version_of(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// The bytes that a strided tensor with elements reaches over in its storage.
long long reach_of(const c10::TensorImpl* impl) {
  const c10::IntArrayRef sizes = impl->sizes(), strides = impl->strides();
  long long elements = 1;
  for (std::size_t dimension = 0; dimension < sizes.size(); ++dimension) {
    elements += (sizes[dimension] - 1) * strides[dimension];
  }
  return elements * static_cast<long long>(impl->itemsize());
}

// The Python object of a tensor: the one that it has, or a new one.
Ref wrap(const at::TensorBase& tensor) {
  Ref object;
  guarded([&] { object = Ref(THPVariable_Wrap(tensor)); });
  return object;
}

// `Tensor.detach` where there is no mode: an alias without history that shares the version counter. May throw.
at::TensorBase detached(const at::TensorBase& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  return at::TensorBase(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

// A new alias in a Python object, also where a mode wants to see how it is made.
Ref new_alias(const at::TensorBase& tensor) {
  Ref object;
  if (no_mode()) {
    guarded([&] { object = Ref(THPVariable_Wrap(detached(tensor))); });
    return object;
  }
  object = wrap(tensor);
  return object ? Ref(PyObject_CallMethod(object.get(), "detach", nullptr)) : Ref();
}

}  // namespace
