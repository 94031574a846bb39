// `Record` of record.py for a storage that a plan keeps and that never leaves, which is its own entry in the IdentityMap.

#pragma once

#include <structmember.h>

#include "tape.hpp"
#include "tensor.hpp"

namespace {

// A storage that stays, and its own entry in the IdentityMap.
struct StaysRecord {
  PyObject_HEAD
  Tape* tape;
  at::TensorBase alias;  // of what was saved first, for its version; may be lent, and then anything may lie in it
  c10::Storage storage;  // both are empty once it was released
  PyObject* key;  // the number of its storage
  PyObject* module;
  PyObject* kind;
  long long number, address, begin, end, version;
  Py_ssize_t index;
  unsigned long thread;
  long handles, waiting, round;
  char counted, wanted, released;
};

extern PyTypeObject record_type;

StaysRecord* as_record(PyObject* object) { return reinterpret_cast<StaysRecord*>(object); }

bool stays(PyObject* record) { return Py_TYPE(record) == &record_type; }

// It was released: its memory goes.
void let_go(StaysRecord* record) {
  const at::TensorBase alias = std::exchange(record->alias, at::TensorBase());
  const c10::Storage storage = std::exchange(record->storage, c10::Storage());
}

void record_dealloc(PyObject* self) {
  StaysRecord* const record = as_record(self);
  Py_XDECREF(reinterpret_cast<PyObject*>(record->tape));
  record->alias.~TensorBase();
  record->storage.~Storage();
  Py_XDECREF(record->key);
  Py_XDECREF(record->module);
  Py_XDECREF(record->kind);
  PyObject_Free(self);
}

// What somebody in Python is given of it.

PyObject* record_self(PyObject* self, void*) { return Py_NewRef(self); }

PyObject* record_nbytes(PyObject* self, void*) { return PyLong_FromLongLong(as_record(self)->end - as_record(self)->begin); }

PyObject* record_tape(PyObject* self, void*) { return Py_NewRef(reinterpret_cast<PyObject*>(as_record(self)->tape)); }

PyObject* record_data(PyObject* self, void*) {
  const c10::Storage& storage = as_record(self)->storage;
  return storage ? wrap(storage).release() : Py_NewRef(Py_None);
}

int record_set_data(PyObject* self, PyObject* value, void*) {
  if (value != Py_None) {
    PyErr_SetString(PyExc_AttributeError, "what stays is never brought");
    return -1;
  }
  let_go(as_record(self));
  return 0;
}

PyObject* record_probe(PyObject* self, void*) {
  const at::TensorBase& alias = as_record(self)->alias;
  return alias.defined() ? wrap(alias).release() : Py_NewRef(Py_None);
}

PyObject* record_device(PyObject* self, void*) {
  const Ref storage(record_data(self, nullptr));
  return !storage || storage.get() == Py_None ? Py_XNewRef(storage.get()) : PyObject_GetAttr(storage.get(), name_device);
}

PyObject* record_near(PyObject* self, void*) { return PyBool_FromLong(static_cast<bool>(as_record(self)->storage)); }

PyObject* record_state(PyObject* self, void*) {
  return Py_NewRef(as_record(self)->released ? known.released : known.resident);
}

PyObject* record_nothing(PyObject*, void*) { return Py_NewRef(Py_None); }

int record_set_nothing(PyObject*, PyObject* value, void*) {
  if (value != Py_None) {
    PyErr_SetString(PyExc_AttributeError, "what stays has no copy elsewhere");
    return -1;
  }
  return 0;
}

PyObject* record_no(PyObject*, void*) { return Py_NewRef(Py_False); }

PyObject* record_yes(PyObject*, void*) { return Py_NewRef(Py_True); }

PyObject* record_zero(PyObject*, void*) { return PyLong_FromLong(0); }

PyObject* record_no_tier(PyObject*, void*) { return PyUnicode_FromString(""); }

PyObject* record_counters(PyObject*, void*) { return PyTuple_New(0); }

PyObject* record_to(PyObject* self, PyObject* state) {
  StaysRecord* const record = as_record(self);
  if (state != known.released || record->released) {
    PyErr_Format(PyExc_RuntimeError, "what stays has no other state than %R", known.released);
    return nullptr;
  }
  record->released = 1;
  Py_RETURN_NONE;
}

// As the only entry of its storage it is the list as well.
PyObject* record_iterator(PyObject* self) {
  const Ref alone(PyTuple_Pack(1, self));
  return alone ? PyObject_GetIter(alone.get()) : nullptr;
}

PyMethodDef record_methods[] = {{"to", record_to, METH_O, "Release it; nothing else ever happens."},
                                {nullptr, nullptr, 0, nullptr}};

PyMemberDef record_members[] = {
    {"module", T_OBJECT, offsetof(StaysRecord, module), READONLY, "Where it was saved, if that is known."},
    {"kind", T_OBJECT, offsetof(StaysRecord, kind), READONLY, "The type of its device."},
    {"cdata", T_LONGLONG, offsetof(StaysRecord, number), READONLY, "The number of its storage."},
    {"address", T_LONGLONG, offsetof(StaysRecord, address), READONLY, "Of its storage."},
    {"begin", T_LONGLONG, offsetof(StaysRecord, begin), READONLY, "Its first byte."},
    {"end", T_LONGLONG, offsetof(StaysRecord, end), READONLY, "Behind its last byte."},
    {"version", T_LONGLONG, offsetof(StaysRecord, version), READONLY, "At which it was saved first."},
    {"thread", T_ULONG, offsetof(StaysRecord, thread), READONLY, "That saved it first."},
    {"index", T_PYSSIZET, offsetof(StaysRecord, index), READONLY, "On its tape."},
    {"handles", T_LONG, offsetof(StaysRecord, handles), 0, "Alive."},
    {"waiting", T_LONG, offsetof(StaysRecord, waiting), 0, "Not unpacked in this round of backward."},
    {"round", T_LONG, offsetof(StaysRecord, round), 0, "Of backward."},
    {"counted", T_BOOL, offsetof(StaysRecord, counted), 0, "Among the resident bytes."},
    {"wanted", T_BOOL, offsetof(StaysRecord, wanted), 0, "Backward is about to need it."},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef record_getters[] = {
    {"record", record_self, nullptr, "As of an entry of the IdentityMap.", nullptr},
    {"identity", record_self, nullptr, "The storage cannot go as long as its alias lives.", nullptr},
    {"nbytes", record_nbytes, nullptr, "Bytes.", nullptr},
    {"tape", record_tape, nullptr, "The forward that it was saved in.", nullptr},
    {"data", record_data, record_set_data, "Its storage, or None once it was released.", nullptr},
    {"probe", record_probe, nullptr, "Shares its version counter.", nullptr},
    {"device", record_device, nullptr, "Where it is.", nullptr},
    {"near", record_near, nullptr, "Whether it was not released.", nullptr},
    {"state", record_state, nullptr, "Resident or released.", nullptr},
    {"counters", record_counters, nullptr, "It lies in no wrapper.", nullptr},
    {"stays", record_yes, nullptr, "Always.", nullptr},
    {"data_begin", record_zero, nullptr, "Its storage is the original.", nullptr},
    {"number", record_zero, nullptr, "It has none: no events are written where records are kept in C.", nullptr},
    {"on_disk", record_no, nullptr, "Never.", nullptr},
    {"was_resized", record_no, nullptr, "Never while it moves.", nullptr},
    {"tier", record_no_tier, nullptr, "None.", nullptr},
    {"extent", record_nothing, record_set_nothing, "None.", nullptr},
    {"transfer", record_nothing, record_set_nothing, "None.", nullptr},
    {"io", record_nothing, record_set_nothing, "None.", nullptr},
    {"slot", record_nothing, record_set_nothing, "None.", nullptr},
    {"outgoing", record_nothing, record_set_nothing, "None.", nullptr},
    {"incoming", record_nothing, record_set_nothing, "None.", nullptr},
    {"error", record_nothing, record_set_nothing, "None.", nullptr},
    {"weak_data", record_nothing, record_set_nothing, "None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject record_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void describe_record() {
  describe(&record_type, "actoffload_hooks.Record", sizeof(StaysRecord), Py_TPFLAGS_DISALLOW_INSTANTIATION, record_getters,
           "A storage that stays for as long as it lives.");
  record_type.tp_methods = record_methods;
  record_type.tp_members = record_members;
  record_type.tp_iter = record_iterator;
  record_type.tp_dealloc = record_dealloc;
}

}  // namespace
