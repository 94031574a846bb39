// A tensor that stays and of which nothing else is known: `Kept` and `KeptActivation` of handles.py.
//
// What is kept is PyTorch's tensor, without an object of Python's for it: that is made when somebody asks.

#pragma once

#include "tensor.hpp"

namespace {

struct Kept {
  PyObject_HEAD
  at::TensorBase alias;
  PyObject* notes;  // where the death of an activation is noted; null for what is none
  PyObject* nbytes;
  long long version;
  long long number;  // of the storage; 0 where the alias is the tensor itself, a leaf, as autograd has it
  char lent;
};

extern PyTypeObject kept_type;

Kept* as_kept(PyObject* object) { return reinterpret_cast<Kept*>(object); }

Ref make_kept(at::TensorBase alias, long long number) {
  Kept* const kept = PyObject_New(Kept, &kept_type);
  if (kept != nullptr) {
    kept->version = version_of(alias);
    new (&kept->alias) at::TensorBase(std::move(alias));
    kept->notes = kept->nbytes = nullptr;
    kept->number = number;
    kept->lent = 0;
  }
  return Ref(reinterpret_cast<PyObject*>(kept));
}

void kept_dealloc(PyObject* self) {
  Kept* const kept = as_kept(self);
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  if (kept->notes != nullptr && !append_to(kept->notes, kept->nbytes)) {
    PyErr_WriteUnraisable(kept->notes);  // not `self`, which would die a second time
  }
  kept->alias.~TensorBase();
  PyErr_Restore(type, value, trace);
  Py_XDECREF(kept->notes);
  Py_XDECREF(kept->nbytes);
  PyObject_Free(self);
}

// Whether a tensor has the version at which it was saved; else the error is autograd's.
bool unchanged(const at::TensorBase& alias, long long version, PyObject* module) {
  const long long now = version_of(alias);
  if (now == version) {
    return true;
  }
  const Ref tensor = wrap(alias);
  return tensor && tell_changed(now, version, known.dtype(tensor.get()), known.shape(tensor.get()), module);
}

// Whether backward ends the graph that it walks, so that what it unpacks now nobody will unpack again: only a node that
// reads its saved tensors twice.
bool last_use() { return !torch::autograd::get_current_graph_task_keep_graph(); }

// Whether a tensor still lies in its storage; else it was lent, its `.data` was replaced, and the error says so.
bool in_place(const at::TensorBase& alias, long long number) {
  return number_of_storage(storage_of(alias)) == number || Ref(PyObject_CallNoArgs(known.replaced));
}

// What backward is given of a tensor that stays: an alias of its own, as it may swap the `.data` of that and ask again.
// The alias itself is lent where it cannot ask again.
PyObject* lend(const at::TensorBase& alias, long long number, char* lent) {
  if (*lent && !in_place(alias, number)) {
    return nullptr;
  }
  if (*lent || !last_use()) {
    return new_alias(alias).release();
  }
  *lent = 1;
  return wrap(alias).release();
}

PyObject* kept_unpack(PyObject* self, PyObject*) {
  Kept* const kept = as_kept(self);
  if (!unchanged(kept->alias, kept->version, Py_None)) {
    return nullptr;
  }
  return kept->number == 0 ? wrap(kept->alias).release() : lend(kept->alias, kept->number, &kept->lent);
}

PyObject* kept_alias(PyObject* self, void*) { return wrap(as_kept(self)->alias).release(); }

PyMethodDef kept_methods[] = {
    {"unpack", kept_unpack, METH_NOARGS, "The saved tensor; raises SavedTensorModifiedError if it was changed."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef kept_members[] = {{"version", T_LONGLONG, offsetof(Kept, version), READONLY, "At which it was saved."},
                              {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef kept_getters[] = {{"alias", kept_alias, nullptr, "Shares memory and version counter.", nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject kept_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void describe_kept() {
  describe(&kept_type, "actoffload_hooks.Kept", sizeof(Kept), Py_TPFLAGS_DISALLOW_INSTANTIATION, kept_getters,
           "A saved tensor that stays where it is: its alias, and the version at which it was saved.");
  kept_type.tp_dealloc = kept_dealloc;
  kept_type.tp_methods = kept_methods;
  kept_type.tp_members = kept_members;
}

}  // namespace
