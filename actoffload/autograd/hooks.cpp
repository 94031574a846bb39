// Pack and unpack of tensors that stay where they are without a record: parameters, buffers, inputs, small tensors, and what
// a plan keeps. They are recognized, aliased, counted and handed out here. What a plan keeps has a place on the tape, which
// Python gives it; all else runs without a frame of Python. All others go to Python's functions.
//
// What this depends on: Python's C interface; PyTorch's C++ headers and libraries, which have no stable binary interface;
// and where a tensor lies in its Python object, which no header says (`TensorPlace`). So it is compiled for the PyTorch that
// is installed, checks that place when it is loaded, and native.py refuses releases that it was not tested with.
//
// Everything runs under the GIL. A tensor is counted by a note, which is one append to a list of Python's. No code runs
// between the note of a new handle and the handle's own knowing that it has to note its death.

#include "tensor.hpp"

#include <iterator>
#include <unordered_map>

namespace {

// What `setup` was told: PyTorch's types, and values and functions of the package.
struct Known {
  PyObject *tensor, *parameter;  // the types of plain tensors
  PyObject* regions;             // a list with one entry for each open `no_offload()` region of any thread
  PyObject* reasons;             // why a noted storage stays, by its note: a parameter's first of all
  PyObject* small;               // why a small tensor stays
  PyObject* place;               // the type of a place on a tape, of what a plan keeps
  PyObject* passed;              // (place, round) -> the handle's next round: backward has come to it
  PyObject* own_counter;         // tensor -> not empty if its version counter says nothing of others
  PyObject* changed;             // (alias, version, place or None) -> raises the error of a tensor that was changed in place
  PyObject* unpack;              // handle -> the tensor, of Python's handles
  PyObject* hand_out;            // tensor -> the tensor, held while a custom Function has it
  PyObject* let_go;              // () -> whether any is held still; those of Functions that have returned are let go
} known;

TensorPlace tensor_place;
PyObject *text_again, *text_append, *text_parameter, *text_input, *text_cpu, *text_name, *text_engine;

// The tensor in a Python object, if it is plain; else null.
const at::TensorBase* plain_tensor(PyObject* object) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != known.tensor && type != known.parameter) {
    return nullptr;
  }
  const at::TensorBase* const tensor = tensor_place.in(object);
  return tensor != nullptr && tensor->defined() && is_plain(tensor->unsafeGetTensorImpl()) ? tensor : nullptr;
}

// -- storages that a plan keeps --------------------------------------------------------------------------------------

struct KeptStorage;

// The storages of one offloader that a plan keeps, while they have handles, whose aliases hold them.
struct KeptStorages {
  PyObject_HEAD
  PyObject* notes;  // of the accounts
  std::unordered_map<c10::StorageImpl*, KeptStorage*> by_number;
};

PyTypeObject kept_storages_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// One of them, in the version in which it was saved: shared by all handles on it. It dies with the last one.
struct KeptStorage {
  PyObject_HEAD
  KeptStorages* among;
  PyObject* place;  // on the tape; its finalizer counts
  c10::StorageImpl* number;
  const void* address;
  c10::VariableVersion counter;
  long long version;
  long long nbytes;
  unsigned long thread;
};

PyTypeObject kept_storage_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void kept_storage_dealloc(PyObject* self) {
  KeptStorage* const storage = reinterpret_cast<KeptStorage*>(self);
  const ErrorKept error;
  auto& by_number = storage->among->by_number;
  const auto listed = by_number.find(storage->number);
  if (listed != by_number.end() && listed->second == storage) {
    by_number.erase(listed);
  }
  Py_DECREF(storage->among);
  storage->counter.~VariableVersion();
  PyObject* const place = storage->place;
  PyObject_Free(self);
  Py_DECREF(place);  // last: it runs Python
}

// Of a storage's memory, which nobody looks at.
const void* address_of(c10::StorageImpl* storage) { return storage->_mutable_data_ptr_no_checks().get(); }

// Null with an error where there is no memory.
Ref make_kept_storage(KeptStorages* among, PyObject* place, const at::TensorBase& tensor, long long nbytes) {
  KeptStorage* const storage = PyObject_New(KeptStorage, &kept_storage_type);
  if (storage == nullptr) {
    return Ref();
  }
  storage->among = reinterpret_cast<KeptStorages*>(Py_NewRef(among));
  storage->place = Py_NewRef(place);
  storage->number = storage_of(tensor);
  storage->address = address_of(storage->number);
  new (&storage->counter) c10::VariableVersion(tensor.unsafeGetTensorImpl()->version_counter());
  storage->version = version_of(tensor);
  storage->nbytes = nbytes;
  storage->thread = PyThread_get_thread_ident();
  Ref made(reinterpret_cast<PyObject*>(storage));
  return guarded([&] { among->by_number.emplace(storage->number, storage); }) ? std::move(made) : Ref();
}

// As `same_counter` of identity.py.
bool same_counter(c10::VariableVersion one, const c10::VariableVersion& other) {
  const auto version = one.current_version();
  if (other.current_version() != version) {
    return false;
  }
  one.set_version(version + 1);
  const bool shared = other.current_version() != version;
  one.set_version(version);
  return shared;
}

// As `IdentityMap.find` of identity.py: the storage of a tensor in the version in which it is kept here; null: it is not.
KeptStorage* find_kept(KeptStorages* among, const at::TensorBase& tensor, long long end) {
  const auto found = among->by_number.find(storage_of(tensor));
  if (found == among->by_number.end()) {
    return nullptr;
  }
  KeptStorage* const known = found->second;
  const bool same = known->version == version_of(tensor) && end <= known->nbytes &&
                    known->address == address_of(known->number) && known->thread == PyThread_get_thread_ident() &&
                    same_counter(known->counter, tensor.unsafeGetTensorImpl()->version_counter());
  return same ? known : nullptr;
}

// -- the handle ------------------------------------------------------------------------------------------------------

// As `Kept`, `KeptActivation` and `Stayed` of handles.py.
struct Kept {
  PyObject_HEAD
  at::TensorBase alias;  // or the tensor itself
  long long version;     // at which it was saved
  PyObject* notes;       // where the death of an activation is noted; else null
  PyObject* nbytes;
  KeptStorage* storage;  // that a plan keeps; else null
  bool itself;
  long round;            // how often it was unpacked before, as `passed` said
};

PyTypeObject kept_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

Kept* as_kept(PyObject* object) { return reinterpret_cast<Kept*>(object); }

// A leaf is kept itself, as autograd does: it makes no cycle, has attributes, and its `.data` may be swapped.
Ref make_kept(const at::TensorBase& tensor, bool itself) {
  at::TensorBase alias;
  if (!guarded([&] { alias = itself ? tensor : detached(tensor); })) {
    return Ref();
  }
  Kept* const kept = PyObject_New(Kept, &kept_type);
  if (kept != nullptr) {
    kept->version = version_of(alias);
    new (&kept->alias) at::TensorBase(std::move(alias));
    kept->notes = kept->nbytes = nullptr;
    kept->storage = nullptr;
    kept->itself = itself;
    kept->round = 0;
  }
  return Ref(reinterpret_cast<PyObject*>(kept));
}

void kept_dealloc(PyObject* self) {
  Kept* const kept = as_kept(self);
  const ErrorKept error;
  if (kept->notes != nullptr && !Ref(PyObject_CallMethodOneArg(kept->notes, text_append, kept->nbytes))) {
    PyErr_WriteUnraisable(kept->notes);  // not `self`, which would die a second time
  }
  Py_XDECREF(kept->storage);  // before the alias, which has held it
  kept->alias.~TensorBase();
  Py_XDECREF(kept->notes);
  Py_XDECREF(kept->nbytes);
  PyObject_Free(self);
}

// Whether PyTorch's engine unpacks for one of its own nodes: 1 or 0; -1 with an error. Python looks again where it is 0.
int asked_by_engine() {
  PyFrameObject* const frame = PyEval_GetFrame();
  if (frame == nullptr) {
    return 1;
  }
  const Ref globals(PyFrame_GetGlobals(frame));
  PyObject* const name = globals ? PyDict_GetItemWithError(globals.get(), text_name) : nullptr;
  if (name == nullptr) {
    return PyErr_Occurred() != nullptr ? -1 : 0;
  }
  return PyObject_RichCompareBool(name, text_engine, Py_EQ);
}

thread_local bool holds = false;  // `hand_out` was called in this thread, and `let_go` has not said since that all went

// Lets go of what was handed out to custom Functions that have returned; false with an error.
bool let_go() {
  const Ref held(holds ? PyObject_CallNoArgs(known.let_go) : Py_NewRef(Py_False));
  const int told = held ? PyObject_IsTrue(held.get()) : -1;
  holds = told != 0;
  return told >= 0;
}

// Gives a tensor, or the error that is set in its place, to whoever unpacks.
PyObject* hand_out(Ref tensor) {
  const int plain = tensor ? asked_by_engine() : -1;
  if (plain != 0) {
    return plain < 0 ? nullptr : tensor.release();
  }
  holds = true;
  return PyObject_CallOneArg(known.hand_out, tensor.get());
}

PyObject* kept_unpack(PyObject* self, PyObject*) {
  Kept* const kept = as_kept(self);
  if (!let_go()) {
    return nullptr;
  }
  if (version_of(kept->alias) != kept->version) {
    const Ref alias = wrap(kept->alias);
    PyObject* const place = kept->storage != nullptr ? kept->storage->place : Py_None;
    return alias ? PyObject_CallFunction(known.changed, "OLO", alias.get(), kept->version, place) : nullptr;
  }
  if (kept->storage != nullptr) {
    const Ref round(PyLong_FromLong(kept->round));
    PyObject* const place = kept->storage->place;
    const Ref next(round ? PyObject_CallFunctionObjArgs(known.passed, place, round.get(), nullptr) : nullptr);
    const long told = next ? PyLong_AsLong(next.get()) : -1;
    if (told < 0) {
      return nullptr;
    }
    kept->round = told;
  }
  if (kept->itself) {
    return wrap(kept->alias).release();
  }
  // Not the alias: whoever is given it may swap its `.data`, and ask again.
  return hand_out(new_alias(kept->alias));
}

// As `Kept.peek` of handles.py; the argument makes no difference to a tensor that stays.
PyObject* kept_peek(PyObject* self, PyObject*) {
  const Kept* const kept = as_kept(self);
  const bool is_static = kept->notes == nullptr && kept->storage == nullptr;
  return is_static || version_of(kept->alias) != kept->version ? Py_NewRef(Py_None) : new_alias(kept->alias).release();
}

PyMethodDef kept_methods[] = {
    {"unpack", kept_unpack, METH_NOARGS, "The saved tensor; raises SavedTensorModifiedError if it was changed in place."},
    {"peek", kept_peek, METH_O, "The saved activation, or None if it was changed in place: no use by backward."},
    {nullptr, nullptr, 0, nullptr}};

// The handle of a tensor whose storage a plan keeps.
PyObject* keep_planned(KeptStorage* storage, const at::TensorBase& tensor) {
  Ref kept = make_kept(tensor, /*itself=*/false);
  if (kept) {
    as_kept(kept.get())->storage = reinterpret_cast<KeptStorage*>(Py_NewRef(storage));
  }
  return kept.release();
}

// The handle of one more tensor of a storage that is kept already.
PyObject* keep_again(KeptStorage* storage, const at::TensorBase& tensor, long long nbytes) {
  Ref kept(keep_planned(storage, tensor));
  const Ref note(kept ? Py_BuildValue("(OLO)", text_again, nbytes, Py_False) : nullptr);
  if (!note || !Ref(PyObject_CallMethodOneArg(storage->among->notes, text_append, note.get()))) {
    return nullptr;
  }
  return kept.release();
}

PyObject* kept_storages_again(PyObject* self, PyObject* arguments) {
  PyObject* object;
  long long begin, end;
  if (!PyArg_ParseTuple(arguments, "O!LL:again", known.tensor, &object, &begin, &end)) {
    return nullptr;
  }
  const at::TensorBase* const tensor = tensor_place.in(object);
  const bool counted = tensor != nullptr && tensor->defined() && tensor->unsafeGetTensorImpl()->has_storage() &&
                       tensor->unsafeGetTensorImpl()->version_counter().enabled();
  KeptStorage* const storage = counted ? find_kept(reinterpret_cast<KeptStorages*>(self), *tensor, end) : nullptr;
  return storage != nullptr ? keep_again(storage, *tensor, end - begin) : Py_NewRef(Py_None);
}

PyObject* kept_storages_new(PyTypeObject* type, PyObject* arguments, PyObject* names) {
  static const char* const kNames[] = {"notes", nullptr};
  PyObject* notes;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "O:KeptStorages", const_cast<char**>(kNames), &notes)) {
    return nullptr;
  }
  KeptStorages* const made = PyObject_New(KeptStorages, type);
  if (made != nullptr) {
    made->notes = Py_NewRef(notes);
    new (&made->by_number) decltype(made->by_number)();
  }
  return reinterpret_cast<PyObject*>(made);
}

void kept_storages_dealloc(PyObject* self) {
  KeptStorages* const storages = reinterpret_cast<KeptStorages*>(self);
  storages->by_number.~unordered_map();
  Py_DECREF(storages->notes);
  PyObject_Free(self);
}

PyMethodDef kept_storages_methods[] = {
    {"again", kept_storages_again, METH_VARARGS,
     "The handle of a tensor that needs the bytes [begin, end) of a storage that is kept; None where it is not."},
    {nullptr, nullptr, 0, nullptr}};

// -- the unpack hook -------------------------------------------------------------------------------------------------

// No plain function: compiled autograd looks into what it calls, unless it has a mark.
struct Unpack {
  PyObject_HEAD
  vectorcallfunc vectorcall;
};

PyTypeObject unpack_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* unpack_vectorcall(PyObject*, PyObject* const* arguments, std::size_t flags, PyObject* names) {
  if (PyVectorcall_NARGS(flags) != 1 || names != nullptr) {
    PyErr_SetString(PyExc_TypeError, "unpack takes one handle");
    return nullptr;
  }
  const Ref handle(Py_NewRef(arguments[0]));  // what runs meanwhile may let the graph go
  const bool ours = Py_TYPE(handle.get()) == &kept_type;
  return ours ? kept_unpack(handle.get(), nullptr) : hand_out(Ref(PyObject_CallOneArg(known.unpack, handle.get())));
}

// -- the pack hook ---------------------------------------------------------------------------------------------------

struct Pack {
  PyObject_HEAD
  PyObject* notes;      // of the accounts
  PyObject* settle;     // counts the notes
  PyObject* fallback;   // the pack hook in Python
  PyObject* save;       // (tensor, bytes, new) -> the place of what a plan keeps, or a handle
  PyObject* kept;       // `KeptStorages`
  PyObject* records;    // not empty for a storage with a record, by number
  PyObject* noted;      // storages that stay, by number: (reference, note)
  PyObject* marked;     // storages with keep(), by number
  PyObject* awaited;    // modules with sharded parameters that were never seen gathered
  PyObject* least;      // the smallest tensor that may move, in bytes, by the type of its device
  PyObject* recording;  // not empty while a step is recorded
  Py_ssize_t many;      // so many notes are counted at once
};

constexpr PyObject* Pack::*kPackMembers[] = {&Pack::notes, &Pack::settle,  &Pack::fallback, &Pack::save,
                                             &Pack::kept,  &Pack::records, &Pack::noted,    &Pack::marked,
                                             &Pack::awaited, &Pack::least, &Pack::recording};

PyTypeObject pack_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// `is_parameter` of tensors.py: 1 or 0; -1, with an error or without, where Python has to look.
int is_parameter(PyObject* object, const at::TensorBase& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (impl->autograd_meta() == nullptr || !tensor.is_view()) {
    const bool wanted = impl->requires_grad() && tensor.is_leaf();
    return wanted || reinterpret_cast<PyObject*>(Py_TYPE(object)) == known.parameter;
  }
  Ref base;
  if (!guarded([&] { base = wrap(tensor._base()); }) || !base) {
    return -1;
  }
  const at::TensorBase* const origin = plain_tensor(base.get());
  if (origin == nullptr) {
    return -1;
  }
  const bool wanted = origin->requires_grad() || (impl->requires_grad() && tensor.is_leaf());
  return reinterpret_cast<PyObject*>(Py_TYPE(base.get())) == known.parameter || (wanted && origin->is_leaf());
}

// Why a storage stays, borrowed; null without an error where nothing that is known of it says so.
PyObject* why_static(const Pack* pack, PyObject* number, bool parameter) {
  PyObject* const found = PyDict_GetItemWithError(pack->noted, number);
  if (found == nullptr || !PyTuple_Check(found) || PyTuple_GET_SIZE(found) != 2) {
    return nullptr;  // Python notes a parameter that it did not know
  }
  return PyDict_GetItemWithError(known.reasons, parameter ? text_parameter : PyTuple_GET_ITEM(found, 1));
}

// Whether Python has to look at a storage that nothing is noted of: it may be marked, in a region, or recomputed.
bool is_special(const Pack* pack, PyObject* number) {
  return PyDict_GET_SIZE(pack->awaited) != 0 || PyDict_Contains(pack->marked, number) != 0 ||
         PyList_GET_SIZE(known.regions) != 0 || PyList_GET_SIZE(pack->recording) != 0 ||
         torch::autograd::get_current_graph_task_id() != -1;
}

// Whether attributes were set on an object, which Python has handed out again.
bool has_attributes(PyObject* object) {
  PyObject** const found = _PyObject_GetDictPtr(object);
  return found != nullptr && *found != nullptr && PyDict_GET_SIZE(*found) != 0;
}

// Whether a storage is too small to move from its device: 1 or 0; -1, with an error or without, where nothing moves from there.
int is_small(const Pack* pack, const c10::TensorImpl* impl, long long storage_bytes) {
  Ref device(Py_NewRef(text_cpu));
  if (!impl->is_cpu() && !guarded([&] {
        device = Ref(PyUnicode_FromString(c10::DeviceTypeName(impl->device_type(), /*lower_case=*/true).c_str()));
      })) {
    return -1;
  }
  PyObject* const least = device ? PyDict_GetItemWithError(pack->least, device.get()) : nullptr;
  return least != nullptr ? storage_bytes < PyLong_AsLongLong(least) : -1;
}

// The handle of a tensor that stays, counted by a note.
PyObject* keep(Pack* pack, const at::TensorBase& tensor, PyObject* reason, long long nbytes, bool activation, bool itself) {
  Ref kept = make_kept(tensor, itself);
  Ref number(PyLong_FromLongLong(nbytes));
  const Ref note(kept && number ? PyTuple_Pack(3, reason, number.get(), activation ? Py_True : Py_False) : nullptr);
  if (!note || !Ref(PyObject_CallMethodOneArg(pack->notes, text_append, note.get()))) {
    return nullptr;
  }
  if (activation) {  // from here on its death is noted
    as_kept(kept.get())->notes = Py_NewRef(pack->notes);
    as_kept(kept.get())->nbytes = number.release();
  }
  const Py_ssize_t notes = PyObject_Size(pack->notes);
  if (notes < 0 || (notes >= pack->many && !Ref(PyObject_CallNoArgs(pack->settle)))) {
    return nullptr;
  }
  return kept.release();
}

// The handle of a tensor that stands for all of its storage, and may move; null without an error where Python has to look.
PyObject* save(Pack* pack, PyObject* object, const at::TensorBase& tensor, PyObject* number, long long nbytes) {
  if (tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr && tensor.is_view()) {
    const Ref own(PyObject_CallOneArg(known.own_counter, object));
    if (!own || PyObject_IsTrue(own.get()) != 0) {
      return nullptr;
    }
  }
  KeptStorages* const among = reinterpret_cast<KeptStorages*>(pack->kept);
  if (KeptStorage* const storage = find_kept(among, tensor, nbytes)) {
    return keep_again(storage, tensor, nbytes);
  }
  const int recorded = PyDict_Contains(pack->records, number);
  const bool is_new = recorded == 0 && among->by_number.count(storage_of(tensor)) == 0;
  const Ref size(recorded >= 0 ? PyLong_FromLongLong(nbytes) : nullptr);
  if (!size) {
    return nullptr;
  }
  Ref saved(PyObject_CallFunctionObjArgs(pack->save, object, size.get(), is_new ? Py_True : Py_False, nullptr));
  if (!saved || reinterpret_cast<PyObject*>(Py_TYPE(saved.get())) != known.place) {
    return saved.release();
  }
  const Ref storage = make_kept_storage(among, saved.get(), tensor, nbytes);
  return storage ? keep_planned(reinterpret_cast<KeptStorage*>(storage.get()), tensor) : nullptr;
}

// The handle of a plain tensor; null without an error where Python has to look at it.
PyObject* pack_plain(Pack* pack, PyObject* object, const at::TensorBase& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const long long nbytes = impl->numel() * static_cast<long long>(impl->itemsize());
  long long storage_bytes = 0;
  if (!guarded([&] { storage_bytes = static_cast<long long>(storage_of(tensor)->nbytes()); })) {
    return nullptr;
  }
  const int parameter = is_parameter(object, tensor);
  const Ref number(PyLong_FromLongLong(reinterpret_cast<long long>(storage_of(tensor))));  // as `_cdata`
  if (!number || parameter < 0) {
    return nullptr;
  }
  if (PyObject* const reason = why_static(pack, number.get(), parameter != 0)) {
    const bool itself = reason != PyDict_GetItemWithError(known.reasons, text_input) && tensor.is_leaf();
    return keep(pack, tensor, reason, nbytes < storage_bytes ? nbytes : storage_bytes, /*activation=*/false, itself);
  }
  // A view of less than half of its storage needs only a part of it, which Python finds (`byte_span`).
  if (parameter != 0 || has_attributes(object) || nbytes == 0 || 2 * reach_of(impl) < storage_bytes || PyErr_Occurred() != nullptr ||
      is_special(pack, number.get())) {
    return nullptr;
  }
  const int small = is_small(pack, impl, storage_bytes);
  if (small == 0) {
    return save(pack, object, tensor, number.get(), storage_bytes);
  }
  return small > 0 ? keep(pack, tensor, known.small, storage_bytes, /*activation=*/true, /*itself=*/false) : nullptr;
}

PyObject* pack_hook(PyObject* self, PyObject* object) {
  Pack* const pack = reinterpret_cast<Pack*>(self);
  if (pack->fallback == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the owner of this hook is being collected");
    return nullptr;
  }
  const at::TensorBase* const tensor = no_mode() ? plain_tensor(object) : nullptr;
  PyObject* const packed = tensor != nullptr ? pack_plain(pack, object, *tensor) : nullptr;
  if (packed != nullptr || PyErr_Occurred() != nullptr) {
    return packed;
  }
  return PyObject_CallOneArg(pack->fallback, object);
}

PyMethodDef pack_methods[] = {{"pack", pack_hook, METH_O, "The pack hook: a handle for a saved tensor."},
                              {nullptr, nullptr, 0, nullptr}};

PyObject* pack_new(PyTypeObject* type, PyObject* arguments, PyObject* names) {
  static const char* const kNames[] = {"notes",  "settle",  "fallback", "save",      "kept", "records", "static",
                                       "marked", "awaited", "least",    "recording", "many", nullptr};
  PyObject* given[std::size(kPackMembers)];  // in their order
  Py_ssize_t many;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "OOOOO!O!O!O!O!O!O!n:Pack", const_cast<char**>(kNames), &given[0],
                                   &given[1], &given[2], &given[3], &kept_storages_type, &given[4], &PyDict_Type, &given[5],
                                   &PyDict_Type, &given[6], &PyDict_Type, &given[7], &PyDict_Type, &given[8],
                                   &PyDict_Type, &given[9], &PyList_Type, &given[10], &many)) {
    return nullptr;
  }
  Pack* const pack = reinterpret_cast<Pack*>(type->tp_alloc(type, 0));  // all members are null
  if (pack != nullptr) {
    for (std::size_t index = 0; index < std::size(kPackMembers); ++index) {
      pack->*kPackMembers[index] = Py_NewRef(given[index]);
    }
    pack->many = many;
  }
  return reinterpret_cast<PyObject*>(pack);
}

int pack_traverse(PyObject* self, visitproc visit, void* arg) {
  for (PyObject* Pack::*const member : kPackMembers) {
    Py_VISIT(reinterpret_cast<Pack*>(self)->*member);
  }
  return 0;
}

int pack_clear(PyObject* self) {
  for (PyObject* Pack::*const member : kPackMembers) {
    Py_CLEAR(reinterpret_cast<Pack*>(self)->*member);
  }
  return 0;
}

void pack_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  pack_clear(self);
  Py_TYPE(self)->tp_free(self);
}

// -- finalizers ------------------------------------------------------------------------------------------------------

// An interrupt (Ctrl-C, or what a signal's handler raises) that came while a kernel ran is raised where Python runs next,
// which is often the finalizer of a tensor that autograd let go of after that kernel. Python prints what a finalizer
// raises, and goes on.
PyObject* interrupt = nullptr;           // a tuple: type and value of one that is still to be raised
thread_local int running_finalizers = 0;  // in this thread

int raise_interrupt(void*) {
  if (running_finalizers == 0 && interrupt != nullptr) {
    const Ref raised(std::exchange(interrupt, nullptr));
    PyErr_SetObject(PyTuple_GET_ITEM(raised.get(), 0), PyTuple_GET_ITEM(raised.get(), 1));
    return -1;
  }
  return 0;
}

// Keeps the exception that was raised just now as the interrupt, unless there is one.
void keep_interrupt() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  const Ref owned_type(type), owned_value(value), owned_trace(trace);
  if (interrupt == nullptr) {
    if (trace != nullptr) {
      PyException_SetTraceback(value, trace);  // it shows that a signal's handler raised it
    }
    interrupt = PyTuple_Pack(2, type, value);
  }
}

constexpr int kMostTries = 4;  // each needs another signal within microseconds

// Takes an interrupt that is waiting, so that `function` runs whole, and has it raised after that, outside of finalizers.
// One that comes meanwhile ends `function` early. So it is called again: each of ours does nothing before the one step
// that cannot be interrupted, and lets nothing escape after it.
PyObject* finalize(PyObject* function, PyObject* object) {
  if (PyErr_CheckSignals() < 0) {
    keep_interrupt();
  }
  ++running_finalizers;
  PyObject* result = PyObject_CallOneArg(function, object);
  for (int tries = 1; result == nullptr && tries < kMostTries; ++tries) {
    keep_interrupt();
    result = PyObject_CallOneArg(function, object);
  }
  --running_finalizers;
  if (interrupt != nullptr) {
    Py_AddPendingCall(raise_interrupt, nullptr);
  }
  return result;
}

PyMethodDef finalize_method = {"__del__", finalize, METH_O, "Runs whole: an interrupt is raised after it."};

PyObject* finalizer(PyObject*, PyObject* function) {
  const Ref bound(PyCFunction_New(&finalize_method, function));
  return bound ? PyInstanceMethod_New(bound.get()) : nullptr;
}

// -- the module ------------------------------------------------------------------------------------------------------

// Finds where tensors lie in samples of PyTorch's tensors, each made in another way; false with an error.
bool find_place(PyObject* samples, PyTypeObject* base, TensorPlace* place) {
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(samples); ++index) {
    PyObject* const sample = PyTuple_GET_ITEM(samples, index);
    if (!PyObject_TypeCheck(sample, base)) {
      PyErr_SetString(PyExc_TypeError, "samples: a tuple of tensors");
      return false;
    }
    if (!place->find(sample)) {
      return false;
    }
  }
  return true;
}

PyObject* setup(PyObject*, PyObject* arguments, PyObject* names) {
  static const char* const kNames[] = {"tensor", "parameter", "regions", "reasons", "small", "place", "passed",
                                       "own_counter", "changed", "unpack", "hand_out", "let_go", "samples", nullptr};
  Known told;
  PyObject* samples;
  TensorPlace place;
  if (!PyArg_ParseTupleAndKeywords(
          arguments, names, "O!O!O!O!UO!OOOOOOO!:setup", const_cast<char**>(kNames), &PyType_Type, &told.tensor,
          &PyType_Type, &told.parameter, &PyList_Type, &told.regions, &PyDict_Type, &told.reasons, &told.small,
          &PyType_Type, &told.place, &told.passed, &told.own_counter, &told.changed, &told.unpack, &told.hand_out,
          &told.let_go, &PyTuple_Type, &samples) ||
      !find_place(samples, reinterpret_cast<PyTypeObject*>(told.tensor), &place)) {
    return nullptr;
  }
  for (PyObject* const one :
       {told.tensor, told.parameter, told.regions, told.reasons, told.small, told.place, told.passed, told.own_counter,
        told.changed, told.unpack, told.hand_out, told.let_go}) {
    Py_INCREF(one);  // for as long as the process lives
  }
  known = told;
  tensor_place = place;
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"setup", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(setup)), METH_VARARGS | METH_KEYWORDS,
     "Tell the module of PyTorch's types and of the package. Once, before all else."},
    {"finalizer", finalizer, METH_O, "A `__del__` that runs a function whole, and lets no interrupt be lost in it."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "actoffload_hooks", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

void describe_types() {
  describe(&kept_type, "actoffload_hooks.Kept", sizeof(Kept), kept_dealloc,
           "A saved tensor that stays where it is, and the version at which it was saved.");
  kept_type.tp_flags |= Py_TPFLAGS_DISALLOW_INSTANTIATION;
  kept_type.tp_methods = kept_methods;

  describe(&kept_storage_type, "actoffload_hooks.KeptStorage", sizeof(KeptStorage), kept_storage_dealloc,
           "A storage that a plan keeps, in the version in which it was saved.");
  kept_storage_type.tp_flags |= Py_TPFLAGS_DISALLOW_INSTANTIATION;

  describe(&kept_storages_type, "actoffload_hooks.KeptStorages", sizeof(KeptStorages), kept_storages_dealloc,
           "The storages of one offloader that a plan keeps.");
  kept_storages_type.tp_new = kept_storages_new;
  kept_storages_type.tp_methods = kept_storages_methods;

  describe(&unpack_type, "actoffload_hooks.Unpack", sizeof(Unpack), nullptr, "The unpack hook: the tensor of a handle.");
  unpack_type.tp_flags |= Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_HAVE_VECTORCALL;
  unpack_type.tp_vectorcall_offset = offsetof(Unpack, vectorcall);
  unpack_type.tp_call = PyVectorcall_Call;

  describe(&pack_type, "actoffload_hooks.Pack", sizeof(Pack), pack_dealloc, "Has the pack hook, and what that looks at.");
  pack_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  pack_type.tp_new = pack_new;
  pack_type.tp_traverse = pack_traverse;
  pack_type.tp_clear = pack_clear;
  pack_type.tp_free = PyObject_GC_Del;
  pack_type.tp_methods = pack_methods;
}

}  // namespace

PyMODINIT_FUNC PyInit_actoffload_hooks() {
  text_again = PyUnicode_InternFromString("");
  text_append = PyUnicode_InternFromString("append");
  text_parameter = PyUnicode_InternFromString("parameter");
  text_input = PyUnicode_InternFromString("input");
  text_cpu = PyUnicode_InternFromString("cpu");
  text_name = PyUnicode_InternFromString("__name__");
  text_engine = PyUnicode_InternFromString("torch.autograd.graph");
  describe_types();
  Ref made(PyModule_Create(&module));
  if (!text_again || !text_append || !text_parameter || !text_input || !text_cpu || !text_name || !text_engine || !made ||
      PyType_Ready(&kept_storage_type) < 0 || PyModule_AddType(made.get(), &kept_type) < 0 ||
      PyModule_AddType(made.get(), &kept_storages_type) < 0 || PyModule_AddType(made.get(), &pack_type) < 0 ||
      PyType_Ready(&unpack_type) < 0 || PyDict_SetItemString(unpack_type.tp_dict, "_torchdynamo_disable", Py_True) < 0) {
    return nullptr;
  }
  Unpack* const unpack = PyObject_New(Unpack, &unpack_type);
  if (unpack == nullptr) {
    return nullptr;
  }
  unpack->vectorcall = unpack_vectorcall;
  const Ref owned(reinterpret_cast<PyObject*>(unpack));
  return PyModule_AddObjectRef(made.get(), "unpack", owned.get()) < 0 ? nullptr : made.release();
}
