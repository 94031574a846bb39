// `Storer.admit` for what a plan keeps, and for what was kept so before.

#pragma once

#include "notes.hpp"
#include "stayed.hpp"

namespace {

// A tensor of the ordinary kind that is large enough to move, and the bytes of its storage that it needs.
struct Wanted {
  PyObject* owner;  // the Storer; its lane does not hold it, as it holds that
  PyObject *tensor, *storage, *number;
  PyObject* kind;  // the type of its device
  long long storage_number, begin, end;
  bool is_view;
};

// Whether the plan keeps the storage that comes next on a tape.
bool keeps(const Lane* lane, const Tape* tape, long long nbytes) {
  if (lane->keeps != Lane::Keeps::planned) {
    return lane->keeps == Lane::Keeps::all;
  }
  const auto index = static_cast<std::size_t>(tape->size());
  return index < lane->sizes->size() && (*lane->sizes)[index] == nbytes;
}

// Whether it may be the local tensor of a DTensor, which counts changes of its own.
Answer has_own_counter(const Lane* lane, const Wanted& wanted) {
  const int possible = wanted.is_view ? PyDict_Contains(lane->modules, name_distributed_tensor) : 0;
  if (possible <= 0) {
    return possible < 0 ? Answer::failed : Answer::no;
  }
  const Ref counters(PyObject_CallOneArg(known.own_counter, wanted.tensor));
  const int some = counters ? PyObject_IsTrue(counters.get()) : -1;
  return some < 0 ? Answer::failed : some != 0 ? Answer::yes : Answer::no;
}

// Looks at what must be looked at on every occasion; false with an error.
bool look(Lane* lane, PyObject* owner, PyObject* kind) {
  const Answer quiet = nothing_to_look_at(lane, kind);
  if (quiet != Answer::no) {
    return quiet == Answer::yes;
  }
  return static_cast<bool>(Ref(PyObject_CallMethodOneArg(owner, name_look_at, kind)));
}

// Whether the device records what it is given into a graph.
Answer capturing(const Lane* lane, PyObject* kind) {
  PyObject* const told = PyDict_GetItemWithError(lane->captures, kind);
  if (told == nullptr) {
    return PyErr_Occurred() != nullptr ? Answer::failed : Answer::no;
  }
  return truth(Ref(PyObject_CallNoArgs(told)));
}

// Whether two tensors share a version counter, where `other` has this version: `same_counter` of identity.py.
Answer same_counter(PyObject* one, PyObject* other, long long version) {
  long long current = 0;
  if (!integer(known.version(one), &current)) {
    return Answer::failed;
  }
  if (current != version) {  // changed in place since; and what is set below would be set back to less
    return Answer::no;
  }
  const Ref pair(PyTuple_Pack(1, one)), then(PyLong_FromLongLong(version)), later(PyLong_FromLongLong(version + 1));
  const Ref low(then ? PyTuple_Pack(1, then.get()) : nullptr), high(later ? PyTuple_Pack(1, later.get()) : nullptr);
  if (!pair || !low || !high) {
    return Answer::failed;
  }
  PyObject* const raised[] = {pair.get(), high.get()};
  PyObject* const lowered[] = {pair.get(), low.get()};
  if (!Ref(PyObject_Vectorcall(known.set_version, raised, 2, nullptr))) {
    return Answer::failed;
  }
  long long now = 0;
  const bool read = integer(known.version(other), &now);
  const bool set = static_cast<bool>(Ref(PyObject_Vectorcall(known.set_version, lowered, 2, nullptr)));
  return !read || !set ? Answer::failed : now != version ? Answer::yes : Answer::no;
}

// The one record of a storage if it holds a tensor's bytes; null without an error where Python has to look.
StaysRecord* find(PyObject* known_here, const Wanted& wanted, long long address, long long version) {
  if (!stays(known_here)) {
    return nullptr;
  }
  StaysRecord* const record = as_record(known_here);
  if (record->version != version || record->begin > wanted.begin || record->end < wanted.end ||
      record->address != address || record->thread != PyThread_get_thread_ident() || record->alias == nullptr) {
    return nullptr;
  }
  const Ref alias(Py_NewRef(record->alias));  // the collector may let the record go meanwhile
  return same_counter(alias.get(), wanted.tensor, version) == Answer::yes && !record->released ? record : nullptr;
}

// A handle on a record that is known already.
PyObject* keep_again(Lane* lane, Ref stayed, StaysRecord* record, const Wanted& wanted) {
  const long long nbytes = wanted.end - wanted.begin;
  if (!counts.packed_tensors.add(lane->accounts, 1) || !counts.packed_bytes.add(lane->accounts, nbytes) ||
      !counts.deduplicated_bytes.add(lane->accounts, nbytes)) {
    return nullptr;
  }
  stayed_belongs(as_stayed(stayed.get()), record);
  return stayed.release();
}

// Renews what storages of one size and module share: the note and the decision.
bool share(Lane* lane, long long nbytes, PyObject* module) {
  if (lane->decision != nullptr && PyTuple_GET_ITEM(lane->decision, 2) == module &&
      PyTuple_GET_ITEM(lane->decision, 1) == lane->reason &&
      PyLong_AsLongLong(PyTuple_GET_ITEM(lane->decision, 0)) == nbytes) {
    return true;
  }
  Ref note(Py_BuildValue("(OLL)", lane->text, nbytes, kRecord));
  Ref decision(Py_BuildValue("(LOO)", nbytes, lane->reason, module));
  if (!note || !decision) {
    return false;
  }
  Py_XSETREF(lane->note, note.release());
  Py_XSETREF(lane->decision, decision.release());
  return true;
}

Ref make_record(Tape* tape, PyObject* alias, PyObject* module, const Wanted& wanted, long long address, long long version) {
  StaysRecord* const record = PyObject_New(StaysRecord, &record_type);
  if (record != nullptr) {
    record->tape = as_tape(Py_NewRef(reinterpret_cast<PyObject*>(tape)));
    record->alias = Py_NewRef(alias);
    record->storage = Py_NewRef(wanted.storage);
    record->module = Py_NewRef(module);
    record->kind = Py_NewRef(wanted.kind);
    record->number = wanted.storage_number;
    record->address = address;
    record->begin = wanted.begin;
    record->end = wanted.end;
    record->version = version;
    record->index = tape->size();
    record->thread = PyThread_get_thread_ident();
    record->handles = record->waiting = record->round = 0;
    record->counted = 1;
    record->wanted = record->released = 0;
  }
  return Ref(reinterpret_cast<PyObject*>(record));
}

// After a new record: the node may hold all that it saves at once, and a backward that comes next may want to be begun.
bool look_further(Lane* lane, PyObject* owner, Tape* tape, long long nbytes) {
  long long node = 0, changes = 0;
  if (!integer(Ref(PyObject_CallNoArgs(known.sequence_number)), &node) || !changes_of(lane, &changes)) {
    return false;
  }
  if (burst_saved(tape, node, nbytes) && !counts.resident_peak_bytes.raise(lane->accounts, tape->node_bytes)) {
    return false;
  }
  return tape_idle(tape, changes) ||
         Ref(PyObject_CallMethodOneArg(owner, name_look_ahead, reinterpret_cast<PyObject*>(tape)));
}

// Undoes what was done of a new record when an error came; null, with that error.
PyObject* forget(Lane* lane, Tape* tape, const Ref& record, PyObject* number) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  if (PyDict_DelItem(lane->entries, number) < 0) {
    PyErr_Clear();
  }
  if (as_record(record.get())->index >= 0) {
    tape_forget(tape, as_record(record.get())->index);
  }
  PyErr_Restore(type, value, trace);
  return nullptr;
}

// The handle of a storage that the plan keeps, or that was kept before; null without an error where Python has to look.
PyObject* keep_planned(Lane* lane, Tape* tape, const Wanted& wanted) {
  if (!lane->open || lane->keeps == Lane::Keeps::nothing || tape->in_backward || tape->live == 0 ||
      has_own_counter(lane, wanted) != Answer::no || capturing(lane, wanted.kind) != Answer::no || !look(lane, wanted.owner, wanted.kind)) {
    return nullptr;
  }
  const long long nbytes = wanted.end - wanted.begin;
  long long address = 0, version = 0;
  Ref then = known.version(wanted.tensor);
  const Ref module(PyDict_GET_SIZE(lane->named) == 0 ? Py_NewRef(Py_None) : PyObject_CallNoArgs(lane->running));
  if (!module || !integer(known.data_ptr(wanted.storage), &address) || !integer(then, &version)) {
    return nullptr;
  }
  PyObject* known_here = PyDict_GetItemWithError(lane->entries, wanted.number);
  const Ref held(Py_XNewRef(known_here));  // what `find` calls may let go of it
  StaysRecord* const before = known_here == nullptr ? nullptr : find(known_here, wanted, address, version);
  if (PyErr_Occurred() != nullptr || (known_here != nullptr && before == nullptr) ||
      (before == nullptr && !keeps(lane, tape, nbytes))) {
    return nullptr;
  }
  const Ref again(Py_XNewRef(reinterpret_cast<PyObject*>(before)));
  Ref alias = hidden_alias(wanted.tensor);
  if (!alias || alias.get() == wanted.tensor || reinterpret_cast<PyObject*>(Py_TYPE(alias.get())) != known.tensor) {
    return nullptr;
  }
  PyObject* const plain = alias.get();
  Ref stayed = make_stayed(lane, wanted.owner, std::move(alias), std::move(then));
  if (!stayed) {
    return nullptr;
  }
  Ref record;
  if (before == nullptr) {
    record = make_record(tape, plain, module.get(), wanted, address, version);
    if (!record || !share(lane, nbytes, module.get())) {
      return nullptr;
    }
  }
  // From here on nothing of Python runs. What ran above may have changed everything.
  if (!free_now(lane) || tape->in_backward || tape->live == 0) {
    return nullptr;
  }
  if (before != nullptr) {
    return before->released ? nullptr : keep_again(lane, std::move(stayed), before, wanted);
  }
  if (PyDict_Contains(lane->entries, wanted.number) != 0 || !keeps(lane, tape, nbytes) ||
      PyDict_SetItem(lane->entries, wanted.number, record.get()) < 0) {
    return nullptr;
  }
  as_record(record.get())->index = tape_append(tape, record.get(), nbytes);
  const Ref noted(as_record(record.get())->index < 0 ? nullptr : PyObject_CallMethodOneArg(lane->notes, name_append, lane->note));
  if (!noted || PyList_Append(tape->decisions, lane->decision) < 0) {  // no memory is left for a few bytes
    return forget(lane, tape, record, wanted.number);
  }
  if (lane->decisions != tape->decisions) {
    Py_XSETREF(lane->decisions, Py_NewRef(tape->decisions));
  }
  stayed_belongs(as_stayed(stayed.get()), as_record(record.get()));
  return look_further(lane, wanted.owner, tape, nbytes) ? stayed.release() : nullptr;
}

}  // namespace
