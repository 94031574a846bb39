// What `Handle` of handles.py knows of a saved view: what it takes to make it again in another storage.

#pragma once

#include "tensor.hpp"

namespace {

struct View {
  at::TensorBase probe;  // shares the version counter, and after `hollow` nothing else
  c10::impl::SizesAndStrides around;
  caffe2::TypeMeta dtype;
  long long offset, nbytes, version;  // offset and nbytes: of the storage that it needs

  explicit View(at::TensorBase alias) : probe(std::move(alias)), version(version_of(probe)) {
    const c10::TensorImpl* const impl = probe.unsafeGetTensorImpl();
    around.resize(static_cast<std::size_t>(impl->dim()));
    around.set_sizes(impl->sizes());
    around.set_strides(impl->strides());
    dtype = impl->dtype();
    offset = impl->storage_offset() * itemsize();
    nbytes = reach_of(impl) * itemsize();
  }
  long long itemsize() const { return static_cast<long long>(dtype.itemsize()); }
};

// `empty` of handles.py for the CPU: without elements, and the same one each time; null with an error, or without where
// a mode makes something else of it.
const at::TensorBase* nothing() {
  static at::TensorBase* made = nullptr;
  if (made == nullptr) {
    const Ref object(PyObject_CallFunctionObjArgs(known.empty, known.float32, known.cpu, nullptr));
    const at::TensorBase* const tensor = object ? plain_tensor(object.get()) : nullptr;
    made = tensor == nullptr ? nullptr : new (std::nothrow) at::TensorBase(*tensor);
    if (tensor != nullptr && made == nullptr) {
      PyErr_NoMemory();
    }
  }
  return made;
}

// `version_probe`: lets go of the memory.
bool hollow(View* view) {
  const at::TensorBase* const empty = nothing();  // there is one: whoever saves asks for it first
  return empty != nullptr &&
         guarded([&] { view->probe.unsafeGetTensorImpl()->shallow_copy_from(empty->getIntrusivePtr()); });
}

// Whether a storage whose first byte is the one at `begin` of the storage that was saved has all that the view needs.
bool fits(const View& view, const c10::Storage& storage, long long begin) {
  return view.offset >= begin && view.offset - begin + view.nbytes <= static_cast<long long>(storage.nbytes());
}

// The view in a storage whose first byte is the one at `begin` of the storage that was saved, with the version counter
// of what was saved: changing what is handed out counts as changing that, and a later unpack then raises, as autograd's
// does. May throw.
at::TensorBase view_in(const View& view, const c10::Storage& storage, long long begin) {
  const c10::TensorImpl* const probe = view.probe.unsafeGetTensorImpl();
  c10::intrusive_ptr<c10::TensorImpl> made = probe->shallow_copy_and_detach(probe->version_counter(), true);
  made->set_storage_and_dtype(storage, view.dtype);
  made->set_sizes_and_strides(view.around.sizes_arrayref(), view.around.strides_arrayref(),
                              (view.offset - begin) / view.itemsize());
  made->set_allow_tensor_metadata_change(false);
  return at::TensorBase(std::move(made));
}

// -- for Python ------------------------------------------------------------------------------------------------------

PyObject* shape_of(const View& view) { return as_tuple(view.around.sizes_arrayref()); }

PyObject* stride_of(const View& view) { return as_tuple(view.around.strides_arrayref()); }

PyObject* dtype_of(const View& view) {
  const at::TensorBase* const empty = nothing();  // there is one, since there is a view
  Ref tensor;
  if (empty != nullptr && guarded([&] {
        auto made = empty->getIntrusivePtr()->shallow_copy_and_detach(c10::VariableVersion(0), true);
        made->set_storage_and_dtype(empty->getIntrusivePtr()->unsafe_storage(), view.dtype);
        tensor = wrap(at::TensorBase(std::move(made)));
      }) && tensor) {
    return known.dtype(tensor.get()).release();
  }
  return nullptr;
}

// Whether what was saved has the version that it had then; else the error is autograd's.
bool unchanged(const View& view, PyObject* module) {
  const long long now = version_of(view.probe);
  if (now == view.version) {
    return true;
  }
  return tell_changed(now, view.version, Ref(dtype_of(view)), Ref(shape_of(view)), module);
}

}  // namespace
