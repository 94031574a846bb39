// `Handle` of handles.py, from backward's asking for it to its death: one view of a storage that may move.

#pragma once

#include "ahead.hpp"
#include "entry.hpp"
#include "inside.hpp"
#include "reference.hpp"
#include "view.hpp"

namespace {

struct Moved {
  PyObject_HEAD
  Lane* lane;
  PyObject* owner;   // the Storer
  PyObject* record;  // null: it was never handed out
  View view;
  long long round;
};

extern PyTypeObject moved_type;

Moved* as_moved(PyObject* object) { return reinterpret_cast<Moved*>(object); }

// A handle that is none yet: nothing happens if it dies before `record` is set. May throw.
Ref make_moved(Lane* lane, PyObject* owner, at::TensorBase alias) {
  View view(std::move(alias));
  Moved* const moved = PyObject_New(Moved, &moved_type);
  if (moved != nullptr) {
    moved->lane = reinterpret_cast<Lane*>(Py_NewRef(reinterpret_cast<PyObject*>(lane)));
    moved->owner = Py_NewRef(owner);
    moved->record = nullptr;
    new (&moved->view) View(std::move(view));
    moved->round = 0;
  }
  return Ref(reinterpret_cast<PyObject*>(moved));
}

// It is a handle of a record from now on; that was counted before.
void moved_belongs(Moved* moved, PyObject* record, long long round) {
  moved->record = Py_NewRef(record);
  moved->round = round;
}

// -- backward --------------------------------------------------------------------------------------------------------

// `Mover.settle` of the CPU's, of a record that is in memory.
bool settle_record(const Lane* lane, PyObject* record) {
  if (!fields.on_disk.is(record, Py_True)) {
    return true;
  }
  const Ref data(Py_NewRef(fields.data(record)));
  long long nbytes = 0;
  if (!fields.nbytes.read(record, &nbytes) || !fields.weak_data.set(record, make_reference(data.get()))) {
    return false;
  }
  fields.data.set(record, Py_None);
  fields.state.set(record, known.spilled);
  if (fields.counted.is(record, Py_True)) {
    fields.counted.set(record, Py_False);
    return came(lane, -nbytes);
  }
  return true;
}

// Whether a record is in memory, and backward goes on along its tape as it did.
bool at_hand(const Lane* lane, const Tape* tape, PyObject* record) {
  return lane->open && PyList_GET_SIZE(lane->recording) == 0 && tape->in_backward && tape->prepared == tape->size() &&
         fields.state.is(record, known.resident) && !fields.data.nothing(record) && fields.slot.nothing(record);
}

// `Backward.obtain` of what is in memory, with the lock held; no: Python has to do it, and nothing was done.
Answer take(Moved* moved, Tape* tape, Ref* storage, long long* begin, bool* all_fetched) {
  Lane* const lane = moved->lane;
  PyObject* const record = moved->record;
  long long index = 0, round = 0, waiting = 0;
  if (!at_hand(lane, tape, record)) {
    return Answer::no;
  }
  if (!look_around(lane, moved->owner)) {
    return Answer::failed;
  }
  const Answer done = nothing_recomputed(lane);
  if (done != Answer::yes || !at_hand(lane, tape, record)) {
    return done == Answer::failed ? done : Answer::no;
  }
  if (!fields.round.read(record, &round) || !fields.index.read(record, &index) ||
      !fields.waiting.read(record, &waiting) || !fields.data_begin.read(record, begin)) {
    return Answer::failed;
  }
  if (moved->round > round) {
    return Answer::no;  // a second unpack of this handle: everybody may ask again
  }
  if (!tape_advance(tape, static_cast<Py_ssize_t>(index)) || !fields.waiting.write(record, waiting - 1)) {
    return Answer::failed;
  }
  moved->round = round + 1;
  fields.error.set(record, Py_None);
  *storage = Ref(Py_NewRef(fields.data(record)));
  const Answer all = nothing_to_fetch(lane, tape);
  *all_fetched = all == Answer::yes;
  if (all == Answer::failed || (waiting <= 1 && !settle_record(lane, record))) {
    return Answer::failed;
  }
  return Answer::yes;
}

Answer obtain(Moved* moved, Ref* storage, long long* begin) {
  Lane* const lane = moved->lane;
  const Ref tape(Py_NewRef(fields.tape(moved->record)));
  if (!lane->open || lane->mover == Py_None || Py_TYPE(tape.get()) != &tape_type || PyObject_Size(lane->to_warn) != 0 ||
      !on_cpu(moved->record)) {
    return Answer::no;
  }
  Answer taken = Answer::failed;
  bool all_fetched = true;
  {
    Inside inside(lane);
    if (inside) {
      taken = take(moved, as_tape(tape.get()), storage, begin, &all_fetched);
    }
    if (!inside.leave()) {
      return Answer::failed;
    }
  }
  if (taken == Answer::yes && !all_fetched && !Ref(PyObject_CallMethodOneArg(moved->owner, name_fetch_ahead, tape.get()))) {
    return Answer::failed;
  }
  return taken;
}

bool obtain_in_python(Moved* moved, Ref* storage, long long* begin) {
  const Ref round(PyLong_FromLongLong(moved->round));
  PyObject* const arguments[] = {moved->owner, moved->record, round.get()};
  const Ref found(round ? PyObject_VectorcallMethod(name_obtain, arguments, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr)
                        : nullptr);
  PyObject* data;
  if (!found || !PyArg_ParseTuple(found.get(), "OLL:obtain", &data, begin, &moved->round)) {
    return false;
  }
  *storage = Ref(Py_NewRef(data));
  return true;
}

// The saved view, made by Python through PyTorch's own methods, so that a mode sees it made.
PyObject* view_in_python(PyObject* self, PyObject* storage, long long begin) {
  const Ref first(PyLong_FromLongLong(begin));
  PyObject* const arguments[] = {self, storage, first.get()};
  return first ? PyObject_Vectorcall(known.view_in, arguments, 3, nullptr) : nullptr;
}

PyObject* moved_unpack(PyObject* self, PyObject*) {
  Moved* const moved = as_moved(self);
  Ref storage;
  long long begin = 0;
  if (!unchanged(moved->view, fields.module(moved->record))) {
    return nullptr;
  }
  const Answer obtained = obtain(moved, &storage, &begin);
  if (obtained == Answer::failed || (obtained == Answer::no && !obtain_in_python(moved, &storage, &begin)) ||
      !storage) {
    return nullptr;
  }
  const c10::Storage* const memory = storage_in(storage.get());
  if (memory == nullptr || !no_mode()) {
    return memory == nullptr ? nullptr : view_in_python(self, storage.get(), begin);
  }
  Ref view;
  bool whole = false;
  if (!guarded([&] {
        whole = fits(moved->view, *memory, begin);
        view = whole ? wrap(view_in(moved->view, *memory, begin)) : Ref();
      })) {
    return nullptr;
  }
  return whole ? view.release() : view_in_python(self, storage.get(), begin);  // its owner has made it smaller
}

// -- the end ---------------------------------------------------------------------------------------------------------

// Takes a record out of those that are known by their storage; null where it is not what was expected. What is
// returned is to be let go of when all else was done.
Ref forget_identity(const Lane* lane, PyObject* record) {
  PyObject* const identity = fields.identity(record);
  if (Py_TYPE(identity) != &reference_type) {
    return Ref();
  }
  PyObject* const number = reinterpret_cast<Reference*>(identity)->number;
  PyObject* const entries = PyDict_GetItemWithError(lane->entries, number);
  if (entries == nullptr || !PyList_CheckExact(entries) || PyList_GET_SIZE(entries) != 1) {
    return Ref();
  }
  PyObject* const entry = PyList_GET_ITEM(entries, 0);
  if (!is_entry(entry) || as_entry(entry)->record != record) {
    return Ref();
  }
  Ref held(Py_NewRef(entries));
  return PyDict_DelItem(lane->entries, number) == 0 ? std::move(held) : Ref();
}

// Whether nothing more than counts, its identity and its place in a row is to be given back of a record.
Answer rests(const Lane* lane, PyObject* record) {
  long long handles = 0;
  if (!on_cpu(record) || !fields.transfer.nothing(record) || !fields.slot.nothing(record) ||
      !(fields.state.is(record, known.spilled) || fields.state.is(record, known.resident))) {
    return Answer::no;
  }
  if (!fields.handles.read(record, &handles)) {
    return Answer::failed;
  }
  PyObject* const tape = fields.tape(record);
  if (handles != 1 || Py_TYPE(tape) != &tape_type || as_tape(tape)->live <= 1) {
    return Answer::no;  // the order of this tape is learned with its last one, and backward may be over
  }
  PyObject* const row = fields.extent(record);
  if (row != Py_None && reinterpret_cast<PyObject*>(Py_TYPE(row)) != fields.row) {
    return Answer::no;
  }
  return nothing_recomputed(lane);
}

// A record leaves the row on disk that it has room in; `empty`: that row, if it was the last.
bool leave_row(PyObject* record, Ref* empty) {
  PyObject* const row = fields.extent(record);
  long long users = 0;
  if (row == Py_None) {
    return true;
  }
  const bool good = fields.row_users.read(row, &users) && fields.row_users.write(row, users - 1);
  if (good && users == 1) {
    *empty = Ref(Py_NewRef(row));
  }
  fields.extent.set(record, Py_None);
  return good;
}

// `Storer.drop` of the last handle of what rests; no: Python has to do it. What it returns in `held` goes last.
Answer drop_moved(Moved* moved, Ref held[2]) {
  Lane* const lane = moved->lane;
  PyObject* const record = moved->record;
  if (lane->mover == Py_None || !free_now(lane) || PyObject_Size(lane->waiters) != 0) {
    return Answer::no;
  }
  const Answer rest = rests(lane, record);
  if (rest != Answer::yes) {
    return rest;
  }
  long long nbytes = 0, index = 0;
  if (!fields.nbytes.read(record, &nbytes) || !fields.index.read(record, &index)) {
    return Answer::failed;
  }
  held[0] = forget_identity(lane, record);
  if (!held[0]) {
    return PyErr_Occurred() != nullptr ? Answer::failed : Answer::no;
  }
  // From here on it is done; nothing of Python runs, and what it held goes when all is done.
  bool good = fields.handles.write(record, 0);
  Ref empty;
  good = leave_row(record, &empty) && good;
  held[1] = Ref(Py_NewRef(fields.data(record)));
  fields.data.set(record, Py_None);
  fields.state.set(record, known.released);
  tape_forget(as_tape(fields.tape(record)), static_cast<Py_ssize_t>(index));
  if (fields.counted.is(record, Py_True)) {
    fields.counted.set(record, Py_False);
    good = came(lane, -nbytes) && good;
  }
  good = died(lane, nbytes) && good;
  good = (!empty || Ref(PyObject_CallMethodOneArg(lane->mover, name_give_room_back, empty.get()))) && good;
  return good ? Answer::yes : Answer::failed;
}

bool drop_moved_in_python(const Moved* moved) {
  const Ref round(PyLong_FromLongLong(moved->round));
  PyObject* const arguments[] = {moved->owner, moved->record, round.get()};
  return round && Ref(PyObject_VectorcallMethod(name_drop, arguments, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

void moved_dealloc(PyObject* self) {
  Moved* const moved = as_moved(self);
  if (moved->record != nullptr) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Ref held[2];
    const Answer dropped = drop_moved(moved, held);
    if (dropped == Answer::failed || (dropped == Answer::no && !drop_moved_in_python(moved))) {
      PyErr_WriteUnraisable(moved->record);
    }
    PyErr_Restore(type, value, trace);
    Py_DECREF(moved->record);
  }
  Py_DECREF(reinterpret_cast<PyObject*>(moved->lane));
  Py_DECREF(moved->owner);
  moved->view.~View();
  PyObject_Free(self);
}

PyObject* moved_probe(PyObject* self, void*) { return wrap(as_moved(self)->view.probe).release(); }

PyObject* moved_dtype(PyObject* self, void*) { return dtype_of(as_moved(self)->view); }

PyObject* moved_shape(PyObject* self, void*) { return shape_of(as_moved(self)->view); }

PyObject* moved_stride(PyObject* self, void*) { return stride_of(as_moved(self)->view); }

PyObject* moved_no(PyObject*, void*) { return Py_NewRef(Py_False); }

PyMethodDef moved_methods[] = {
    {"unpack", moved_unpack, METH_NOARGS, "The saved view, bit for bit; raises SavedTensorModifiedError if it was changed."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef moved_members[] = {{"owner", T_OBJECT, offsetof(Moved, owner), READONLY, "The offloader."},
                               {"record", T_OBJECT, offsetof(Moved, record), READONLY, "Of its storage."},
                               {"offset", T_LONGLONG, offsetof(Moved, view) + offsetof(View, offset), READONLY, "Of the view, in bytes."},
                               {"version", T_LONGLONG, offsetof(Moved, view) + offsetof(View, version), READONLY, "At which it was saved."},
                               {"round", T_LONGLONG, offsetof(Moved, round), READONLY, "How often it was unpacked."},
                               {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef moved_getters[] = {{"probe", moved_probe, nullptr, "Shares the version counter.", nullptr},
                               {"dtype", moved_dtype, nullptr, "Of the view.", nullptr},
                               {"shape", moved_shape, nullptr, "Of the view.", nullptr},
                               {"stride", moved_stride, nullptr, "Of the view, in elements.", nullptr},
                               {"conj", moved_no, nullptr, "Never.", nullptr},
                               {"neg", moved_no, nullptr, "Never.", nullptr},
                               {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject moved_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void describe_moved() {
  describe(&moved_type, "actoffload_hooks.Handle", sizeof(Moved), Py_TPFLAGS_DISALLOW_INSTANTIATION, moved_getters,
           "One saved view of a record.");
  moved_type.tp_methods = moved_methods;
  moved_type.tp_members = moved_members;
  moved_type.tp_dealloc = moved_dealloc;
}

}  // namespace
