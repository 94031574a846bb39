// What those who keep what a plan keeps know of their offloader, and whether they may be inside of it now.
//
// All that they do is done at once under the GIL: between the look at the offloader's lock, which nobody may hold, and the
// last change no line of Python runs and nothing is allocated that Python's collector knows, so that no other thread and
// no finalizer comes in between. Where something is out of the ordinary `Storer` does the same in Python, on the same
// objects.

#pragma once

#include <vector>

#include "lock.hpp"
#include "slots.hpp"

namespace {

// What is known of an offloader by those who keep for it, and what its plan keeps.
struct Lane {
  enum class Keeps : char { nothing, planned, all };  // nothing comes first: a new lane keeps nothing
  using Moves = Keeps;                                // what is known to move, without asking
  PyObject_HEAD
  PyObject* accounts;
  PyObject* notes;     // Accounts.notes
  PyObject* recording; // a list, empty while no step is recorded
  PyObject* entries;   // of the IdentityMap, by the storage's number
  PyObject* phases;
  PyObject* dropped;   // handles that died and were not worked off
  PyObject* to_warn;
  PyObject* lock;      // a Lock
  PyObject* waiters;   // of the condition on it
  PyObject* watched;   // by type of device: a tuple of what must be empty for there to be nothing to look at
  PyObject* captures;  // by type of device, where that is possible: tells whether a graph is being captured
  PyObject* running;   // tells the name of the module that runs
  PyObject* named;     // a dictionary, empty while no names are known
  PyObject* modules;   // sys.modules
  PyObject* core;      // a Core
  PyObject* mover;     // of the CPU's tensors, or None where Python does all of it
  PyObject* pattern;   // a Record of the CPU's that is none: what new ones are copies of
  PyObject* watched_on_cpu;  // that of the CPU
  PyObject* reason;    // a KeepReason
  PyObject* text;      // and its value
  PyObject* note;      // the one that was taken last, of a death too, and the decision: storages of one size share them
  PyObject* death;
  PyObject* decision;
  PyObject* moving;    // the decision of what moves that was noted last: shared likewise
  PyObject* decisions; // of the forward that saved last
  std::vector<long long>* sizes;  // by index: the bytes of the storage that the plan keeps there, else -1
  std::vector<long long>* moved_sizes;  // the same of what moves
  Keeps keeps;
  Moves moves;
  char open;
  char bounded;  // there is a device budget
};

constexpr std::size_t kLaneMembers[] = {
    offsetof(Lane, accounts), offsetof(Lane, notes),
    offsetof(Lane, recording), offsetof(Lane, entries), offsetof(Lane, phases),   offsetof(Lane, dropped),
    offsetof(Lane, to_warn), offsetof(Lane, lock),    offsetof(Lane, waiters),  offsetof(Lane, watched),
    offsetof(Lane, captures), offsetof(Lane, running),  offsetof(Lane, named),  offsetof(Lane, modules),
    offsetof(Lane, core),   offsetof(Lane, mover),   offsetof(Lane, pattern), offsetof(Lane, watched_on_cpu), offsetof(Lane, reason),
    offsetof(Lane, text),   offsetof(Lane, note),    offsetof(Lane, death), offsetof(Lane, decision), offsetof(Lane, moving),
    offsetof(Lane, decisions)};

// Whether nobody is inside of the offloader, and nothing waits for whoever comes next: then C may be inside.
bool free_now(const Lane* lane) {
  return lane->open && !as_lock(lane->lock)->held && PyObject_Size(lane->dropped) == 0 &&
         PyList_GET_SIZE(lane->recording) == 0;
}

// Whether the block that was recomputed last is done with.
Answer nothing_recomputed(const Lane* lane) {
  long long nbytes = 0;
  return !counts.recomputed_bytes.read(lane->accounts, &nbytes) ? Answer::failed : nbytes == 0 ? Answer::yes : Answer::no;
}

// What is watched on a type of device; null where nothing is, or with an error.
PyObject* watched_on(const Lane* lane, PyObject* kind) {
  return kind == name_cpu ? lane->watched_on_cpu : PyDict_GetItemWithError(lane->watched, kind);
}

// Whether a device has nothing under way that must be looked at on every occasion.
Answer nothing_to_look_at(const Lane* lane, PyObject* kind) {
  PyObject* const watched = watched_on(lane, kind);
  if (watched == nullptr || !PyTuple_Check(watched)) {
    return PyErr_Occurred() != nullptr ? Answer::failed : Answer::no;
  }
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(watched); ++place) {
    const Py_ssize_t size = PyObject_Size(PyTuple_GET_ITEM(watched, place));
    if (size != 0) {
      return size < 0 ? Answer::failed : Answer::no;
    }
  }
  return Answer::yes;
}

// The number that changes whenever what follows the running phase may have changed.
bool changes_of(const Lane* lane, long long* changes) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(lane->phases)) == fields.phases) {
    return fields.phases_changes.read(lane->phases, changes);
  }
  return integer(Ref(PyObject_GetAttr(lane->phases, name_changes)), changes);
}

// -- the type --------------------------------------------------------------------------------------------------------

constexpr std::size_t kGivenToLane = 17;  // the first of the members

PyObject* lane_new(PyTypeObject* type, PyObject* arguments, PyObject* names) {
  static const char* const kNames[] = {"accounts", "notes",   "recording", "entries", "phases",
                                       "dropped", "to_warn", "lock",     "waiters", "watched",  "captures",  "running",
                                       "named",   "modules", "core", "mover", "pattern", "bounded", nullptr};
  Ref self(type->tp_alloc(type, 0));
  if (!self) {
    return nullptr;
  }
  Lane* const lane = reinterpret_cast<Lane*>(self.get());
  int bounded = 0;
  PyObject* given[kGivenToLane];
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "OOO!O!OOOO!OO!O!OO!O!OOOp:Lane", const_cast<char**>(kNames), &given[0],
                                   &given[1], &PyList_Type, &given[2], &PyDict_Type, &given[3], &given[4], &given[5],
                                   &given[6], &lock_type, &given[7], &given[8], &PyDict_Type, &given[9], &PyDict_Type,
                                   &given[10], &given[11], &PyDict_Type, &given[12], &PyDict_Type, &given[13],
                                   &given[14], &given[15], &given[16], &bounded)) {
    return nullptr;
  }
  if (!is_accounts(given[0])) {
    return nullptr;
  }
  for (std::size_t at = 0; at < kGivenToLane; ++at) {
    *member_of(lane, kLaneMembers[at]) = Py_NewRef(given[at]);
  }
  lane->sizes = new (std::nothrow) std::vector<long long>;
  lane->moved_sizes = new (std::nothrow) std::vector<long long>;
  if (lane->sizes == nullptr || lane->moved_sizes == nullptr) {
    PyErr_NoMemory();
    return nullptr;
  }
  lane->watched_on_cpu = Py_XNewRef(PyDict_GetItemWithError(lane->watched, name_cpu));
  lane->open = 1;
  lane->bounded = bounded != 0;
  return self.release();
}

int lane_clear(PyObject* self) {
  reinterpret_cast<Lane*>(self)->open = 0;
  return clear_members<kLaneMembers>(self);
}

void lane_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  lane_clear(self);
  delete reinterpret_cast<Lane*>(self)->sizes;
  delete reinterpret_cast<Lane*>(self)->moved_sizes;
  Py_TYPE(self)->tp_free(self);
}

// A sequence of numbers; false with an error.
bool read_sizes(PyObject* sizes, std::vector<long long>* taken) {
  const Ref row(PySequence_Fast(sizes, "sizes: a sequence, or None"));
  if (!row) {
    return false;
  }
  try {
    for (Py_ssize_t place = 0; place < PySequence_Fast_GET_SIZE(row.get()); ++place) {
      taken->push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(row.get(), place)));
    }
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  return PyErr_Occurred() == nullptr;
}

// follow(reason, text, kept, moved): what stays from now on, and why, and what moves.
PyObject* lane_follow(PyObject* self, PyObject* arguments) {
  Lane* const lane = reinterpret_cast<Lane*>(self);
  PyObject *reason, *text, *kept, *moved;
  std::vector<long long> kept_sizes, moved_sizes;
  if (!PyArg_ParseTuple(arguments, "OUOO:follow", &reason, &text, &kept, &moved) || !read_sizes(kept, &kept_sizes) ||
      !read_sizes(moved, &moved_sizes)) {
    return nullptr;
  }
  lane->sizes->swap(kept_sizes);
  lane->moved_sizes->swap(moved_sizes);
  lane->keeps = Lane::Keeps::planned;
  lane->moves = Lane::Moves::planned;
  Py_XSETREF(lane->reason, Py_NewRef(reason));
  Py_XSETREF(lane->text, Py_NewRef(text));
  Py_RETURN_NONE;
}

// keep_all(reason, text): all stays from now on, and why.
PyObject* lane_keep_all(PyObject* self, PyObject* arguments) {
  Lane* const lane = reinterpret_cast<Lane*>(self);
  PyObject *reason, *text;
  if (!PyArg_ParseTuple(arguments, "OU:keep_all", &reason, &text)) {
    return nullptr;
  }
  lane->keeps = Lane::Keeps::all;
  lane->moves = Lane::Moves::nothing;
  Py_XSETREF(lane->reason, Py_NewRef(reason));
  Py_XSETREF(lane->text, Py_NewRef(text));
  Py_RETURN_NONE;
}

PyObject* lane_keep_nothing(PyObject* self, PyObject*) {
  reinterpret_cast<Lane*>(self)->keeps = Lane::Keeps::nothing;
  reinterpret_cast<Lane*>(self)->moves = Lane::Moves::nothing;
  Py_RETURN_NONE;
}

PyObject* lane_move_all(PyObject* self, PyObject*) {
  reinterpret_cast<Lane*>(self)->keeps = Lane::Keeps::nothing;
  reinterpret_cast<Lane*>(self)->moves = Lane::Moves::all;
  Py_RETURN_NONE;
}

PyObject* lane_close(PyObject* self, PyObject*) {
  reinterpret_cast<Lane*>(self)->open = 0;
  Py_RETURN_NONE;
}

PyMethodDef lane_methods[] = {
    {"follow", lane_follow, METH_VARARGS, "follow(reason, text, kept, moved): what stays from now on, and what moves."},
    {"keep_all", lane_keep_all, METH_VARARGS, "keep_all(reason, text): all stays from now on."},
    {"move_all", lane_move_all, METH_NOARGS, "All moves from now on."},
    {"keep_nothing", lane_keep_nothing, METH_NOARGS, "Python decides of everything from now on."},
    {"close", lane_close, METH_NOARGS, "Python does everything from now on."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef lane_members[] = {
    {"decisions", T_OBJECT, offsetof(Lane, decisions), 0, "What was decided in the forward that saved last, or None."},
    {nullptr, 0, 0, 0, nullptr}};

PyTypeObject lane_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void describe_lane() {
  describe(&lane_type, "actoffload_hooks.Lane", sizeof(Lane), 0, nullptr,
           "What an offloader's plan keeps, and what its handles have to know of the offloader.");
  lane_type.tp_methods = lane_methods;
  lane_type.tp_members = lane_members;
  make_collected(&lane_type, lane_new, lane_dealloc, traverse_members<kLaneMembers>, lane_clear);
}

}  // namespace
