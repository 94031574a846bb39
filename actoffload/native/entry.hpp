// `Entry` of identity.py of what was saved in C: a live record, and how its bytes are known.

#pragma once

#include <structmember.h>

#include "tensor.hpp"

namespace {

struct Entry {
  PyObject_HEAD
  PyObject* reference;   // to its storage
  PyObject* record;
  at::TensorBase probe;  // shares the version counter of what was saved
  long long address, version, begin, end;
  unsigned long thread;
};

extern PyTypeObject entry_type;

bool is_entry(PyObject* object) { return Py_TYPE(object) == &entry_type; }

Entry* as_entry(PyObject* object) { return reinterpret_cast<Entry*>(object); }

// Of a record that this thread saves now.
Ref make_entry(PyObject* reference, PyObject* record, const at::TensorBase& probe, long long address, long long begin,
               long long end) {
  Entry* const entry = PyObject_GC_New(Entry, &entry_type);
  if (entry != nullptr) {
    entry->reference = Py_NewRef(reference);
    entry->record = Py_NewRef(record);
    new (&entry->probe) at::TensorBase(probe);
    entry->address = address;
    entry->version = version_of(probe);
    entry->begin = begin;
    entry->end = end;
    entry->thread = PyThread_get_thread_ident();
    PyObject_GC_Track(entry);
  }
  return Ref(reinterpret_cast<PyObject*>(entry));
}

constexpr std::size_t kEntryMembers[] = {offsetof(Entry, reference), offsetof(Entry, record)};

void entry_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear_members<kEntryMembers>(self);
  as_entry(self)->probe.~TensorBase();
  PyObject_GC_Del(self);
}

PyObject* entry_probe(PyObject* self, void*) { return wrap(as_entry(self)->probe).release(); }

PyObject* entry_counters(PyObject*, void*) { return PyTuple_New(0); }

PyMemberDef entry_members[] = {
    {"ref", T_OBJECT, offsetof(Entry, reference), READONLY, "To its storage."},
    {"record", T_OBJECT, offsetof(Entry, record), READONLY, "The record."},
    {"address", T_LONGLONG, offsetof(Entry, address), READONLY, "Of its storage."},
    {"version", T_LONGLONG, offsetof(Entry, version), READONLY, "At which it was saved."},
    {"begin", T_LONGLONG, offsetof(Entry, begin), READONLY, "Its first byte."},
    {"end", T_LONGLONG, offsetof(Entry, end), READONLY, "Behind its last byte."},
    {"thread", T_ULONG, offsetof(Entry, thread), READONLY, "That saved it."},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef entry_getters[] = {{"probe", entry_probe, nullptr, "Shares the version counter.", nullptr},
                               {"counters", entry_counters, nullptr, "It lies in no wrapper.", nullptr},
                               {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject entry_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void describe_entry() {
  describe(&entry_type, "actoffload_hooks.Entry", sizeof(Entry), Py_TPFLAGS_DISALLOW_INSTANTIATION, entry_getters,
           "A live record, and how its bytes are known.");
  entry_type.tp_members = entry_members;
  make_collected(&entry_type, nullptr, entry_dealloc, traverse_members<kEntryMembers>, clear_members<kEntryMembers>);
}

}  // namespace
