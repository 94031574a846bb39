// PyTorch's tensors and storages, read and made where they lie: through its own headers, without its Python.
//
// Only of the plain kind: dense and strided, of no transform, no mode and no inference. Whatever else there is, Python
// looks at through PyTorch's methods.

#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>

#include "known.hpp"

// Of libraries that are loaded already; the headers that declare these take several times as long to compile.
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
PyObject* THPStorage_Wrap(c10::Storage storage);
namespace torch::autograd {
int get_current_graph_task_id();
bool get_current_graph_task_keep_graph();
}  // namespace torch::autograd

namespace {

// Where Python's objects hold PyTorch's: behind their head; or, until 2.10, in an owner there, which may only have
// borrowed what it has.
template <typename Held>
class Place {
 public:
  // Whether it is found in an object that says, as `_cdata`, what it holds; and where it was found in others.
  bool find(const PyObject* object, long long number) {
    const bool was_found = found_;
    const std::ptrdiff_t before = behind_;
    for (const std::ptrdiff_t behind : {std::ptrdiff_t{0}, kOwner}) {
      behind_ = behind;
      long long there = 0;
      std::memcpy(&there, in_memory(object), sizeof there);
      if (there == number && (behind == 0 || !borrowed(object))) {
        found_ = true;
        return !was_found || behind_ == before;
      }
    }
    return false;
  }
  // Null where it is borrowed.
  const Held* operator()(const PyObject* object) const {
    return behind_ != 0 && borrowed(object) ? nullptr : reinterpret_cast<const Held*>(in_memory(object));
  }

 private:
  static constexpr std::ptrdiff_t kOwner = sizeof(void*);
  const char* in_memory(const PyObject* object) const { return reinterpret_cast<const char*>(object + 1) + behind_; }
  static bool borrowed(const PyObject* object) { return *reinterpret_cast<const char*>(object + 1) != 0; }

  std::ptrdiff_t behind_ = 0;
  bool found_ = false;
};

Place<at::TensorBase> tensor_place;
Place<c10::Storage> storage_place;

// Does something of PyTorch's, which may throw; false with Python's error.
template <typename Work>
bool guarded(Work work) noexcept {
  try {
    work();
    return true;
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    if (PyErr_Occurred() == nullptr) {  // it may be Python's that came through
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "something that is no error came out of PyTorch");
  }
  return false;
}

// -- which tensors, and when -----------------------------------------------------------------------------------------

const std::uint64_t kPlainKeys =
    c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU}).raw_repr() &
    ~c10::full_backend_mask;
const std::uint64_t kIgnoredKeys = c10::full_backend_mask | c10::autocast_dispatch_keyset.raw_repr();

bool is_plain(const c10::TensorImpl* impl) {
  return (impl->key_set().raw_repr() & ~kIgnoredKeys) == kPlainKeys && impl->device_type() != c10::kMeta &&
         impl->has_storage() && !impl->has_symbolic_sizes_strides() && impl->version_counter().enabled();
}

// Whether no mode and no transform looks at what this thread does, so that nobody misses what is done past PyTorch's
// dispatcher.
bool no_mode() { return c10::impl::tls_local_dispatch_key_set().included_ == c10::default_included_set; }

// The tensor in an object of one of PyTorch's own two types, if it is plain.
const at::TensorBase* plain_tensor(PyObject* object) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != known.tensor && type != known.parameter) {
    return nullptr;
  }
  const at::TensorBase* const tensor = tensor_place(object);
  return tensor != nullptr && tensor->defined() && is_plain(tensor->unsafeGetTensorImpl()) ? tensor : nullptr;
}

// -- tensors ---------------------------------------------------------------------------------------------------------

// -1 where there is none, as of a tensor of inference.
long long version_of(const at::TensorBase& tensor) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : -1;
}

c10::StorageImpl* storage_of(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Elements of its storage that a strided tensor with elements reaches over.
long long reach_of(const c10::TensorImpl* impl) {
  const c10::IntArrayRef sizes = impl->sizes(), strides = impl->strides();
  long long reach = 1;
  for (std::size_t at = 0; at < sizes.size(); ++at) {
    reach += (sizes[at] - 1) * strides[at];
  }
  return reach;
}

// `check_version` of handles.py, of a tensor that was saved at one version and is at another: autograd's error.
bool tell_changed(long long now, long long then, const Ref& dtype, const Ref& shape, PyObject* module) {
  const Ref is(PyLong_FromLongLong(now)), was(PyLong_FromLongLong(then));
  if (!is || !was || !dtype || !shape) {
    return false;
  }
  PyObject* const arguments[] = {is.get(), was.get(), dtype.get(), shape.get(), module};
  return static_cast<bool>(Ref(PyObject_Vectorcall(known.check_version, arguments, 5, nullptr)));
}

// An alias that shares the version counter and has no history: `Tensor.detach`, where there is no mode. May throw.
at::TensorBase detached(const at::TensorBase& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  return at::TensorBase(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

// The same of a plain tensor, through PyTorch's own method where a mode wants to see it; false with an error, or without
// where Python has to look at what the mode made of it.
bool make_alias(PyObject* object, const at::TensorBase& tensor, at::TensorBase* alias) {
  if (no_mode()) {
    return guarded([&] { *alias = detached(tensor); });
  }
  const Ref made = known.detach(object);
  const at::TensorBase* const found = made && made.get() != object ? plain_tensor(made.get()) : nullptr;
  if (found == nullptr || storage_of(*found) != storage_of(tensor)) {
    return false;
  }
  *alias = *found;
  return true;
}

// Python's object for a tensor: the one that it has, or a new one.
Ref wrap(const at::TensorBase& tensor) {
  Ref object;
  guarded([&] { object = Ref(THPVariable_Wrap(tensor)); });
  return object;
}

// An alias for somebody else, likewise.
Ref new_alias(const at::TensorBase& tensor) {
  if (!no_mode()) {
    const Ref object = wrap(tensor);
    return object ? known.detach(object.get()) : Ref();
  }
  Ref alias;
  guarded([&] { alias = Ref(THPVariable_Wrap(detached(tensor))); });
  return alias;
}

// Whether two tensors share a version counter, where `other` has this version: `same_counter` of identity.py.
bool same_counter(const at::TensorBase& one, const at::TensorBase& other, long long version) {
  c10::VariableVersion counter = one.unsafeGetTensorImpl()->version_counter();
  if (!counter.enabled() || counter.current_version() != version) {
    return false;  // changed in place since; and what is set below would be set back to less
  }
  counter.set_version(version + 1);
  const bool same = version_of(other) != version;
  counter.set_version(version);
  return same;
}

// -- storages --------------------------------------------------------------------------------------------------------

// The number of a storage: `_cdata`.
long long number_of_storage(const c10::StorageImpl* storage) { return reinterpret_cast<long long>(storage); }

// The storage in an object of Python's; null with an error.
const c10::Storage* storage_in(PyObject* object) {
  const bool is_one = PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(known.storage)) != 0;
  const c10::Storage* const storage = is_one ? storage_place(object) : nullptr;
  if (storage == nullptr || !*storage) {
    PyErr_Format(PyExc_TypeError, "%.100s object where one of PyTorch's storages was expected", Py_TYPE(object)->tp_name);
    return nullptr;
  }
  return storage;
}

bool address_of(PyObject* object, long long* address) {
  const c10::Storage* const storage = storage_in(object);
  if (storage == nullptr) {
    return false;
  }
  return guarded([&] { *address = reinterpret_cast<long long>(storage->unsafeGetStorageImpl()->data()); });
}

// The address of the memory that a tensor lies in, which is its own from now on: as `UntypedStorage.data_ptr`.
bool memory_of(const at::TensorBase& tensor, long long* address) {
  return guarded([&] { *address = reinterpret_cast<long long>(storage_of(tensor)->mutable_data()); });
}

Ref wrap(const c10::Storage& storage) {
  Ref object;
  guarded([&] { object = Ref(THPStorage_Wrap(storage)); });
  return object;
}

// -- whether all is where it should be -------------------------------------------------------------------------------

// `samples`: tensors, each of another making. Finds where they and their storages lie.
bool find_tensors(PyObject* samples, PyTypeObject* base, PyTypeObject* storage_base) {
  const Ref all(PySequence_Fast(samples, "samples: a sequence of tensors"));
  Place<at::TensorBase> tensors;
  Place<c10::Storage> storages;
  for (Py_ssize_t place = 0; all && place < PySequence_Fast_GET_SIZE(all.get()); ++place) {
    PyObject* const sample = PySequence_Fast_GET_ITEM(all.get(), place);
    const Ref storage(PyObject_CallMethod(sample, "untyped_storage", nullptr));
    long long tensor_number = 0, storage_number = 0;
    if (storage && (!PyObject_TypeCheck(sample, base) || !PyObject_TypeCheck(storage.get(), storage_base))) {
      PyErr_SetString(PyExc_TypeError, "samples: tensors");
      return false;
    }
    if (!storage || !integer(Ref(PyObject_GetAttrString(sample, "_cdata")), &tensor_number) ||
        !integer(Ref(PyObject_GetAttrString(storage.get(), "_cdata")), &storage_number)) {
      return false;
    }
    if (!tensors.find(sample, tensor_number) || !storages.find(storage.get(), storage_number)) {
      PyErr_SetString(PyExc_TypeError, "this release of PyTorch lays out its objects otherwise");
      return false;
    }
  }
  if (all) {
    tensor_place = tensors;
    storage_place = storages;
  }
  return static_cast<bool>(all);
}

}  // namespace
