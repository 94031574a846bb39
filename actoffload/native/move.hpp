// `Storer.admit` for what moves from the CPU, and for what was saved before and may move.

#pragma once

#include "keep.hpp"
#include "moved.hpp"

namespace {

// What is found out of a tensor before the lock is taken.
struct Saving {
  Lane* lane;
  Tape* tape;
  const Wanted* wanted;
  const at::TensorBase& alias;
  PyObject* storage;  // Python's
  PyObject* module;
  long long address;
  long long nbytes() const { return wanted->nbytes(); }
};

// Whether it is known, without asking, that the storage that comes next on a tape moves.
bool moves(const Lane* lane, const Tape* tape, long long nbytes) {
  if (lane->moves != Lane::Moves::planned) {
    return lane->moves == Lane::Moves::all;
  }
  const auto index = static_cast<std::size_t>(tape->size());
  return index < lane->moved_sizes->size() && (*lane->moved_sizes)[index] == nbytes;
}

// An instance of a class that is a tuple with names; the items are its own from now on, and null after an error.
template <std::size_t Count>
Ref named_tuple(PyObject* type, PyObject* const (&items)[Count]) {
  PyTypeObject* const made_of = reinterpret_cast<PyTypeObject*>(type);
  bool whole = true;
  for (PyObject* const item : items) {
    whole = whole && item != nullptr;
  }
  Ref tuple(whole ? made_of->tp_alloc(made_of, static_cast<Py_ssize_t>(Count)) : nullptr);
  for (std::size_t at = 0; at < Count; ++at) {
    if (tuple) {
      PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(at), items[at]);
    } else {
      Py_XDECREF(items[at]);
    }
  }
  return tuple;
}

// -- what was saved before -------------------------------------------------------------------------------------------

// `IdentityMap.find` among the entries of a storage: `record` is null where there is none. No: Python has to look.
Answer saved_before(PyObject* entries, const Saving& saving, PyObject** record) {
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(entries); ++place) {
    PyObject* const entry = PyList_GET_ITEM(entries, place);
    if (!is_entry(entry)) {
      return Answer::no;  // of Python's; or a record that is kept in C, which is its own
    }
    const Entry* const known_as = as_entry(entry);
    if (known_as->version == version_of(saving.alias) && known_as->begin <= saving.wanted->begin &&
        known_as->end >= saving.wanted->end && known_as->address == saving.address &&
        known_as->thread == PyThread_get_thread_ident() &&
        same_counter(known_as->probe, saving.alias, known_as->version)) {
      *record = known_as->record;
      return Answer::yes;
    }
  }
  return Answer::yes;
}

// Counts one more handle of a record.
bool admit_again(Moved* moved, PyObject* record, const Saving& saving) {
  PyObject* const accounts = saving.lane->accounts;
  long long round = 0;
  if (!fields.round.read(record, &round) || !counts.packed_tensors.add(accounts, 1) ||
      !counts.packed_bytes.add(accounts, saving.nbytes()) ||
      !counts.deduplicated_bytes.add(accounts, saving.nbytes()) || !fields.handles.add(record, 1)) {
    return false;
  }
  moved_belongs(moved, record, round);
  return fields.waiting.add(record, 1);
}

// -- what is new -----------------------------------------------------------------------------------------------------

Ref new_record(const Saving& saving) {
  Ref record = copy_record(saving.lane->pattern);
  PyObject* const made = record.get();
  const bool good = made != nullptr && fields.number.set(made, Ref(PyIter_Next(known.numbers))) &&
                    fields.address.write(made, saving.address) && fields.begin.write(made, saving.wanted->begin) &&
                    fields.end.write(made, saving.wanted->end) && fields.nbytes.write(made, saving.nbytes()) &&
                    fields.index.write(made, saving.tape->size()) &&
                    fields.identity.set(made, make_reference(saving.alias.unsafeGetTensorImpl()->unsafe_storage()));
  if (!good) {
    return Ref();
  }
  fields.data.set(made, saving.storage);
  fields.module.set(made, saving.module);
  fields.tape.set(made, reinterpret_cast<PyObject*>(saving.tape));
  return record;
}

// `IdentityMap.add`.
bool remember(const Saving& saving, PyObject* record, PyObject* before) {
  const Ref entry = make_entry(fields.identity(record), record, saving.alias, saving.address, saving.wanted->begin,
                               saving.wanted->end);
  const Ref entries(before == nullptr ? PyList_New(0) : PySequence_List(before));
  return entry && entries && PyList_Append(entries.get(), entry.get()) == 0 &&
         PyDict_SetItem(saving.lane->entries, saving.wanted->number, entries.get()) == 0;
}

// Forgets a record that no handle answers for; false, with the error that there was.
bool forget_new(const Saving& saving, PyObject* before) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject* const entries = saving.lane->entries;
  if ((before == nullptr ? PyDict_DelItem(entries, saving.wanted->number)
                         : PyDict_SetItem(entries, saving.wanted->number, before)) < 0) {
    PyErr_Clear();
  }
  PyErr_Restore(type, value, trace);
  return false;
}

// Gives a record to a handle, which answers for it from now on.
bool admit_new(Moved* moved, const Ref& record, const Saving& saving, PyObject* before) {
  PyObject* const accounts = saving.lane->accounts;
  if (!fields.handles.write(record.get(), 1) || !fields.waiting.write(record.get(), 1) ||
      !counts.packed_tensors.add(accounts, 1) || !counts.packed_bytes.add(accounts, saving.nbytes()) ||
      !remember(saving, record.get(), before)) {
    return false;
  }
  if (tape_append(saving.tape, record.get(), saving.nbytes()) < 0) {
    return forget_new(saving, before);
  }
  if (!born(saving.lane, saving.nbytes())) {
    tape_forget(saving.tape, saving.tape->size() - 1);
    return forget_new(saving, before);
  }
  moved_belongs(moved, record.get(), 0);
  return true;
}

// `Layout.around`.
Ref layout_around(long long address, long long nbytes, long long alignment) {
  const long long least = alignment > known.min_alignment ? alignment : known.min_alignment;
  const long long head = (alignment - address % alignment) % alignment;
  const long long body = (nbytes - head) / alignment * alignment, tail = nbytes - head - body;
  const char* const memory = reinterpret_cast<const char*>(address);
  return named_tuple(known.layout_class, {PyLong_FromLongLong(address % least),
                                          PyBytes_FromStringAndSize(memory, static_cast<Py_ssize_t>(head)),
                                          PyBytes_FromStringAndSize(memory + nbytes - tail, static_cast<Py_ssize_t>(tail)),
                                          PyLong_FromLongLong(head), PyLong_FromLongLong(body)});
}

bool number_of(PyObject* object, PyObject* name, long long* value) {
  return integer(Ref(PyObject_GetAttr(object, name)), value);
}

// `RowMover.begin` of what goes into a row that has room; no: Python has to do it, and nothing was done.
Answer begin_in_row(PyObject* record, const Saving& saving) {
  PyObject *const mover = saving.lane->mover, *const core = saving.lane->core;
  const long long nbytes = saving.nbytes();
  if (reinterpret_cast<PyObject*>(Py_TYPE(mover)) != known.row_mover || nbytes < known.bounce_bytes || nbytes >= known.small_bytes) {
    return Answer::no;
  }
  long long full = 0, pending = 0, limit = 0, alignment = 0, filled = 0;
  if (!number_of(mover, name__full_bytes, &full) || !number_of(mover, name_pending_limit_bytes, &limit) ||
      !number_of(mover, name_alignment, &alignment) || !number_of(core, name_pending_bytes, &pending)) {
    return Answer::failed;
  }
  if (pending + nbytes > limit) {
    return Answer::no;
  }
  const Ref joint(PyObject_GetAttr(mover, name__open));
  PyObject* const watched = watched_on(saving.lane, name_cpu);
  if (!joint || watched == nullptr) {
    return PyErr_Occurred() != nullptr ? Answer::failed : Answer::no;
  }
  if (!fields.io.set(record, layout_around(saving.address + saving.wanted->begin, nbytes, alignment)) ||
      !known.append(PyTuple_GET_ITEM(watched, 0), record) ||
      PyDict_SetItem(fields.joint_records(joint.get()), record, Py_None) < 0 ||
      !fields.joint_nbytes.add(joint.get(), nbytes)) {
    return Answer::failed;
  }
  fields.transfer.set(record, joint.get());
  fields.state.set(record, known.spilling);
  if (!add_to(core, name_pending_bytes, nbytes) || !fields.joint_nbytes.read(joint.get(), &filled)) {
    return Answer::failed;
  }
  return filled < full || Ref(PyObject_CallMethodNoArgs(mover, name_flush)) ? Answer::yes : Answer::failed;
}

// The decision that a storage moves; storages of one size and module share it.
bool decide_to_move(Lane* lane, Tape* tape, long long nbytes, PyObject* module) {
  PyObject* const last = lane->moving;
  if (last == nullptr || PyTuple_GET_ITEM(last, 2) != module || PyLong_AsLongLong(PyTuple_GET_ITEM(last, 0)) != nbytes) {
    PyObject* const decision = Py_BuildValue("(LOO)", nbytes, Py_None, module);
    if (decision == nullptr) {
      return false;
    }
    Py_XSETREF(lane->moving, decision);
  }
  if (lane->decisions != tape->decisions) {
    Py_XSETREF(lane->decisions, Py_NewRef(tape->decisions));
  }
  return PyList_Append(tape->decisions, lane->moving) == 0;
}

// `Storer._place` of what is known to move; what has to stay all the same is Python's.
bool place(PyObject* record, PyObject* owner, const Saving& saving) {
  Lane* const lane = saving.lane;
  const long long nbytes = saving.nbytes();
  if (!came(lane, nbytes)) {
    return false;
  }
  fields.counted.set(record, Py_True);
  const Answer begun = begin_in_row(record, saving);
  if (begun == Answer::failed) {
    return false;
  }
  if (begun == Answer::no) {
    const Ref stays(PyObject_CallMethodOneArg(owner, name_begin_alone, record));
    if (!stays || stays.get() == Py_True) {  // then it was decided there
      return static_cast<bool>(stays);
    }
  }
  return raise_to(lane->core, name_largest_bytes, nbytes) && counts.moved_bytes.add(lane->accounts, nbytes) &&
         raise_to(lane->core, name_largest_moved_bytes, nbytes) &&
         decide_to_move(lane, saving.tape, nbytes, saving.module);
}

// -- all of it -------------------------------------------------------------------------------------------------------

// With the lock held; no: Python has to look, and nothing was done. `fresh`: the record is new.
Answer admit(Moved* moved, const Saving& saving, bool* fresh) {
  Lane* const lane = saving.lane;
  Tape* const tape = saving.tape;
  if (!look_around(lane, saving.wanted->owner)) {
    return Answer::failed;
  }
  if (!lane->open || PyList_GET_SIZE(lane->recording) != 0 || tape->in_backward || tape->live == 0) {
    return Answer::no;  // what ran before may have changed everything
  }
  PyObject* const known_here = PyDict_GetItemWithError(lane->entries, saving.wanted->number);
  if (known_here != nullptr && !PyList_CheckExact(known_here)) {
    return Answer::no;  // it is kept in C
  }
  const Ref held(Py_XNewRef(known_here));
  PyObject* before = nullptr;
  const Answer looked = known_here != nullptr ? saved_before(known_here, saving, &before) : Answer::yes;
  if (looked != Answer::yes) {
    return looked;
  }
  if (before != nullptr) {
    return admit_again(moved, before, saving) ? Answer::yes : Answer::failed;
  }
  *fresh = true;
  const bool decided = moves(lane, tape, saving.nbytes());
  const Ref record = new_record(saving);
  if (!record || !admit_new(moved, record, saving, known_here)) {
    return Answer::failed;
  }
  if (decided) {
    return place(record.get(), saving.wanted->owner, saving) ? Answer::yes : Answer::failed;
  }
  const Ref alias = wrap(saving.alias);
  PyObject* const arguments[] = {saving.wanted->owner, record.get(), alias.get(), reinterpret_cast<PyObject*>(tape)};
  return alias && Ref(PyObject_VectorcallMethod(name__place, arguments, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr)) ? Answer::yes
                                                                                                          : Answer::failed;
}

// What autograd is to be given: this handle, or, where the record was found to stay, Python's for that.
PyObject* hand_over(Ref handle, PyObject* owner) {
  Moved* const moved = as_moved(handle.get());
  if (fields.stays.is(moved->record, Py_False)) {
    return hollow(&moved->view) ? handle.release() : nullptr;
  }
  const Ref alias = wrap(moved->view.probe);
  PyObject* const arguments[] = {owner, moved->record, alias.get()};
  PyObject* const stayed = alias ? PyObject_Vectorcall(known.stayed, arguments, 3, nullptr) : nullptr;
  if (stayed != nullptr) {
    Py_CLEAR(moved->record);  // it belongs to the other one
  }
  return stayed;
}

// The handle of a storage that may move; null without an error where Python has to look.
PyObject* move(Lane* lane, Tape* tape, const Wanted& wanted) {
  if (nothing() == nullptr || !lane->open || lane->bounded || lane->mover == Py_None || !wanted.cpu || tape->in_backward || tape->live == 0 ||
      PyList_GET_SIZE(lane->recording) != 0 || PyObject_Size(lane->to_warn) != 0 ||
      has_own_counter(lane, wanted) != Answer::no) {
    return nullptr;
  }
  long long address = 0;
  const Ref module(PyDict_GET_SIZE(lane->named) == 0 ? Py_NewRef(Py_None) : PyObject_CallNoArgs(lane->running));
  const Ref storage = wrap(wanted.tensor.unsafeGetTensorImpl()->unsafe_storage());
  if (!module || !storage || !memory_of(wanted.tensor, &address)) {
    return nullptr;
  }
  at::TensorBase alias;
  Ref handle;
  if (!make_alias(wanted.object, wanted.tensor, &alias) ||
      !guarded([&] { handle = make_moved(lane, wanted.owner, alias); }) || !handle) {
    return nullptr;
  }
  const Saving saving{lane, tape, &wanted, alias, storage.get(), module.get(), address};
  Answer admitted = Answer::failed;
  bool fresh = false;
  {
    Inside inside(lane);
    if (inside) {
      admitted = admit(as_moved(handle.get()), saving, &fresh);
    }
    if (!inside.leave() || admitted != Answer::yes) {
      return nullptr;
    }
  }
  if (fresh && !look_further(lane, wanted.owner, tape, saving.nbytes())) {
    return nullptr;
  }
  return hand_over(std::move(handle), wanted.owner);
}

}  // namespace
