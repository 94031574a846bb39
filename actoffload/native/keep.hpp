// `Storer.admit` for what a plan keeps, and for what was kept so before.

#pragma once

#include "notes.hpp"
#include "stayed.hpp"

namespace {

// A tensor of the ordinary kind that is large enough to move, and the bytes of its storage that it needs.
struct Wanted {
  PyObject* owner;  // the Storer; its lane does not hold it, as it holds that
  PyObject* object;  // Python's, of the tensor
  const at::TensorBase& tensor;
  PyObject* number;  // of its storage
  PyObject* kind;    // the type of its device
  long long begin, end;
  bool is_view, cpu;

  c10::StorageImpl* storage() const { return storage_of(tensor); }
  long long nbytes() const { return end - begin; }
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
  const Ref counters(PyObject_CallOneArg(known.own_counter, wanted.object));
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

// The one record of a storage if it holds a tensor's bytes; null where Python has to look.
StaysRecord* find(PyObject* known_here, const Wanted& wanted, long long address, long long version) {
  if (!stays(known_here)) {
    return nullptr;
  }
  StaysRecord* const record = as_record(known_here);
  if (record->version != version || record->begin > wanted.begin || record->end < wanted.end ||
      record->address != address || record->thread != PyThread_get_thread_ident() || !record->alias.defined()) {
    return nullptr;
  }
  return same_counter(record->alias, wanted.tensor, version) && !record->released ? record : nullptr;
}

// A handle on a record that is known already.
PyObject* keep_again(Lane* lane, Ref stayed, StaysRecord* record, const Wanted& wanted) {
  if (!counts.packed_tensors.add(lane->accounts, 1) || !counts.packed_bytes.add(lane->accounts, wanted.nbytes()) ||
      !counts.deduplicated_bytes.add(lane->accounts, wanted.nbytes())) {
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

Ref make_record(Tape* tape, const at::TensorBase& alias, PyObject* module, const Wanted& wanted, long long address) {
  StaysRecord* const record = PyObject_New(StaysRecord, &record_type);
  if (record != nullptr) {
    record->tape = as_tape(Py_NewRef(reinterpret_cast<PyObject*>(tape)));
    new (&record->alias) at::TensorBase(alias);
    new (&record->storage) c10::Storage(wanted.tensor.unsafeGetTensorImpl()->unsafe_storage());
    record->module = Py_NewRef(module);
    record->kind = Py_NewRef(wanted.kind);
    record->key = Py_NewRef(wanted.number);
    record->number = number_of_storage(wanted.storage());
    record->address = address;
    record->begin = wanted.begin;
    record->end = wanted.end;
    record->version = version_of(alias);
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
  long long changes = 0;
  if (!changes_of(lane, &changes)) {
    return false;
  }
  if (burst_saved(tape, static_cast<long long>(at::sequence_number::peek()), nbytes) && !counts.resident_peak_bytes.raise(lane->accounts, tape->node_bytes)) {
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
  const long long nbytes = wanted.nbytes(), version = version_of(wanted.tensor);
  long long address = 0;
  const Ref module(PyDict_GET_SIZE(lane->named) == 0 ? Py_NewRef(Py_None) : PyObject_CallNoArgs(lane->running));
  if (!module || !memory_of(wanted.tensor, &address)) {
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
  at::TensorBase alias;
  if (!make_alias(wanted.object, wanted.tensor, &alias)) {
    return nullptr;
  }
  Ref stayed = make_stayed(lane, wanted.owner, alias);
  if (!stayed) {
    return nullptr;
  }
  Ref record;
  if (before == nullptr) {
    record = make_record(tape, alias, module.get(), wanted, address);
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
  if (!keeps(lane, tape, nbytes) || PyDict_SetDefault(lane->entries, wanted.number, record.get()) != record.get()) {
    return nullptr;
  }
  as_record(record.get())->index = tape_append(tape, record.get(), nbytes);
  const bool noted = as_record(record.get())->index >= 0 && append_to(lane->notes, lane->note);
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
