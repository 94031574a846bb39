// A tensor that stays and of which nothing else is known: `Kept` and `KeptActivation` of handles.py.

#pragma once

#include "known.hpp"

namespace {

struct Kept {
  PyObject_HEAD
  PyObject* alias;
  PyObject* version;
  PyObject* notes;  // where the death of an activation is noted; null for what is none
  PyObject* nbytes;
  long long number;  // of the storage; 0 where the alias is the tensor itself, a leaf, as autograd has it
  char lent;
};

extern PyTypeObject kept_type;

// An alias that lies in a handle alone refers to nothing that the collector could free, and there may be 100,000 of
// them: it passes them by. Not what a mode returns in the place of an alias, which others have as well.
Ref hidden_alias(PyObject* tensor) {
  Ref alias = known.detach(tensor);
  if (alias && alias.get() != tensor && Py_REFCNT(alias.get()) == 1 &&
      reinterpret_cast<PyObject*>(Py_TYPE(alias.get())) == known.tensor && PyObject_GC_IsTracked(alias.get())) {
    PyObject_GC_UnTrack(alias.get());
  }
  return alias;
}

PyObject* make_kept(Ref alias, long long number) {
  if (!alias) {
    return nullptr;
  }
  Ref version = known.version(alias.get());
  if (!version) {
    return nullptr;
  }
  Kept* const kept = PyObject_New(Kept, &kept_type);
  if (kept != nullptr) {
    kept->alias = alias.release();
    kept->version = version.release();
    kept->notes = kept->nbytes = nullptr;
    kept->number = number;
    kept->lent = 0;
  }
  return reinterpret_cast<PyObject*>(kept);
}

void kept_dealloc(PyObject* self) {
  Kept* const kept = reinterpret_cast<Kept*>(self);
  if (kept->notes != nullptr) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Ref done(PyObject_CallMethodOneArg(kept->notes, name_append, kept->nbytes));
    if (!done) {
      PyErr_WriteUnraisable(kept->notes);  // not `self`, which would die a second time
    }
    PyErr_Restore(type, value, trace);
  }
  Py_XDECREF(kept->alias);
  Py_XDECREF(kept->version);
  Py_XDECREF(kept->notes);
  Py_XDECREF(kept->nbytes);
  PyObject_Free(self);
}

// An alias for somebody else: seen by the collector again, as whoever has it may give it attributes.
PyObject* handed_out(PyObject* alias) {
  if (!PyObject_GC_IsTracked(alias)) {
    PyObject_GC_Track(alias);
  }
  return Py_NewRef(alias);
}

// Whether a tensor has the version at which it was saved; else the error is autograd's.
bool unchanged(PyObject* alias, PyObject* version, PyObject* module) {
  const Ref now = known.version(alias);
  long long is = 0;
  if (!integer(now, &is)) {
    return false;
  }
  if (is == PyLong_AsLongLong(version)) {
    return true;
  }
  const Ref dtype = known.dtype(alias);
  const Ref shape(dtype ? known.shape(alias) : Ref());
  if (!shape) {
    return false;
  }
  PyObject* const arguments[] = {now.get(), version, dtype.get(), shape.get(), module};
  return static_cast<bool>(Ref(PyObject_Vectorcall(known.check_version, arguments, 5, nullptr)));
}

// Whether backward ends the graph that it walks, so that what it unpacks now nobody will unpack again: only a node that
// reads its saved tensors twice.
Answer last_use() {
  if (known.keeps_graph == Py_None) {
    return Answer::no;
  }
  const Ref kept(PyObject_CallNoArgs(known.keeps_graph));
  return !kept ? Answer::failed : kept.get() == Py_False ? Answer::yes : Answer::no;
}

// Whether a tensor still lies in its storage; else it was lent, its `.data` was replaced, and the error says so.
bool in_place(PyObject* alias, long long number) {
  const Ref storage = known.untyped_storage(alias);
  long long now = 0;
  if (!storage || !integer(known.number(storage.get()), &now)) {
    return false;
  }
  return now == number || Ref(PyObject_CallNoArgs(known.replaced));
}

// What backward is given of a tensor that stays: an alias of its own, as it may swap the `.data` of that and ask again.
// The alias itself is lent where it cannot ask again.
PyObject* lend(PyObject* alias, long long number, char* lent) {
  if (*lent) {
    return in_place(alias, number) ? known.detach(alias).release() : nullptr;
  }
  const Answer last = last_use();
  if (last == Answer::failed) {
    return nullptr;
  }
  if (last == Answer::no) {
    return known.detach(alias).release();
  }
  *lent = 1;
  return handed_out(alias);
}

PyObject* kept_unpack(PyObject* self, PyObject*) {
  Kept* const kept = reinterpret_cast<Kept*>(self);
  if (!unchanged(kept->alias, kept->version, Py_None)) {
    return nullptr;
  }
  return kept->number == 0 ? handed_out(kept->alias) : lend(kept->alias, kept->number, &kept->lent);
}

PyObject* kept_alias(PyObject* self, void*) { return handed_out(reinterpret_cast<Kept*>(self)->alias); }

PyObject* kept_version(PyObject* self, void*) { return Py_NewRef(reinterpret_cast<Kept*>(self)->version); }

PyMethodDef kept_methods[] = {
    {"unpack", kept_unpack, METH_NOARGS, "The saved tensor; raises SavedTensorModifiedError if it was changed."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef kept_getters[] = {{"alias", kept_alias, nullptr, "Shares memory and version counter.", nullptr},
                              {"version", kept_version, nullptr, "At which it was saved.", nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject kept_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

}  // namespace
