// Pack and unpack of the tensors that never move: parameters, buffers, inputs and small tensors. They are recognized,
// aliased, counted and returned without a frame of Python. All others go to Python's functions.
//
// What this depends on: Python's C interface; PyTorch's C++ headers and libraries, which have no stable binary interface;
// and where a tensor lies in its Python object, which no header says (`TensorPlace`). So it is compiled for the PyTorch that
// is installed, checks that place when it is loaded, and native.py refuses releases that it was not tested with.
//
// Everything runs under the GIL. A tensor is counted by a note, which is one append to a list of Python's. No code runs
// between the note of a new handle and the handle's own knowing that it has to note its death.

#include "tensor.hpp"

#include <iterator>

namespace {

// What `setup` was told: PyTorch's types, and values and functions of the package.
struct Known {
  PyObject *tensor, *parameter;  // the types of plain tensors
  PyObject* regions;             // a list with one entry for each open `no_offload()` region of any thread
  PyObject* reasons;             // why a noted storage stays, by its note: a parameter's first of all
  PyObject* small;               // why a small tensor stays
  PyObject* changed;             // (alias, version) -> raises the error of a tensor that was changed in place
  PyObject* unpack;              // handle -> the tensor, of Python's handles
  PyObject* hand_out;            // tensor -> the tensor, held while a custom Function has it
  PyObject* let_go;              // () -> whether any is held still; those of Functions that have returned are let go
} known;

TensorPlace tensor_place;
PyObject *text_append, *text_parameter, *text_input, *text_cpu, *text_name, *text_engine;

// The tensor in a Python object, if it is plain; else null.
const at::TensorBase* plain_tensor(PyObject* object) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != known.tensor && type != known.parameter) {
    return nullptr;
  }
  const at::TensorBase* const tensor = tensor_place.in(object);
  return tensor != nullptr && tensor->defined() && is_plain(tensor->unsafeGetTensorImpl()) ? tensor : nullptr;
}

// -- the handle ------------------------------------------------------------------------------------------------------

// As `Kept` and `KeptActivation` of handles.py.
struct Kept {
  PyObject_HEAD
  at::TensorBase alias;  // or the tensor itself
  long long version;     // at which it was saved
  PyObject* notes;       // where the death of an activation is noted; else null
  PyObject* nbytes;
  bool itself;
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
    kept->itself = itself;
  }
  return Ref(reinterpret_cast<PyObject*>(kept));
}

void kept_dealloc(PyObject* self) {
  Kept* const kept = as_kept(self);
  const ErrorKept error;
  if (kept->notes != nullptr && !Ref(PyObject_CallMethodOneArg(kept->notes, text_append, kept->nbytes))) {
    PyErr_WriteUnraisable(kept->notes);  // not `self`, which would die a second time
  }
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
    return alias ? PyObject_CallFunction(known.changed, "OL", alias.get(), kept->version) : nullptr;
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
  const bool is_static = kept->notes == nullptr;
  return is_static || version_of(kept->alias) != kept->version ? Py_NewRef(Py_None) : new_alias(kept->alias).release();
}

PyMethodDef kept_methods[] = {
    {"unpack", kept_unpack, METH_NOARGS, "The saved tensor; raises SavedTensorModifiedError if it was changed in place."},
    {"peek", kept_peek, METH_O, "The saved activation, or None if it was changed in place: no use by backward."},
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
  PyObject* save;       // (tensor, bytes) -> the handle of one that may move
  PyObject* noted;      // storages that stay, by number: (reference, note)
  PyObject* marked;     // storages with keep(), by number
  PyObject* awaited;    // modules with sharded parameters that were never seen gathered
  PyObject* least;      // the smallest tensor that may move, in bytes, by the type of its device
  PyObject* recording;  // not empty while a step is recorded
  Py_ssize_t many;      // so many notes are counted at once
};

constexpr PyObject* Pack::*kPackMembers[] = {&Pack::notes,  &Pack::settle,  &Pack::fallback,
                                             &Pack::save,   &Pack::noted,   &Pack::marked,
                                             &Pack::awaited, &Pack::least,  &Pack::recording};

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
    const Ref size(PyLong_FromLongLong(storage_bytes));
    return size ? PyObject_CallFunctionObjArgs(pack->save, object, size.get(), nullptr) : nullptr;
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
  static const char* const kNames[] = {"notes",  "settle",  "fallback", "save",      "static",
                                       "marked", "awaited", "least",    "recording", "many", nullptr};
  PyObject* given[std::size(kPackMembers)];  // in their order
  Py_ssize_t many;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "OOOOO!O!O!O!O!n:Pack", const_cast<char**>(kNames), &given[0],
                                   &given[1], &given[2], &given[3], &PyDict_Type, &given[4], &PyDict_Type, &given[5],
                                   &PyDict_Type, &given[6], &PyDict_Type, &given[7], &PyList_Type, &given[8], &many)) {
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
  static const char* const kNames[] = {"tensor",  "parameter", "regions",  "reasons", "small",  "changed",
                                       "unpack", "hand_out",  "let_go", "samples", nullptr};
  Known told;
  PyObject* samples;
  TensorPlace place;
  if (!PyArg_ParseTupleAndKeywords(
          arguments, names, "O!O!O!O!UOOOOO!:setup", const_cast<char**>(kNames), &PyType_Type, &told.tensor,
          &PyType_Type, &told.parameter, &PyList_Type, &told.regions, &PyDict_Type, &told.reasons, &told.small,
          &told.changed, &told.unpack, &told.hand_out, &told.let_go, &PyTuple_Type, &samples) ||
      !find_place(samples, reinterpret_cast<PyTypeObject*>(told.tensor), &place)) {
    return nullptr;
  }
  for (PyObject* const one :
       {told.tensor, told.parameter, told.regions, told.reasons, told.small, told.changed, told.unpack, told.hand_out,
        told.let_go}) {
    Py_INCREF(one);  // for as long as the process lives
  }
  known = told;
  tensor_place = place;
  Py_RETURN_NONE;
}

// `same_counter` of identity.py, without giving up the GIL; None for objects that only borrow their tensors.
PyObject* same_counter(PyObject*, PyObject* arguments) {
  PyObject *one, *other;
  if (!PyArg_ParseTuple(arguments, "O!O!:same_counter", known.tensor, &one, known.tensor, &other)) {
    return nullptr;
  }
  const at::TensorBase *const first = tensor_place.in(one), *const second = tensor_place.in(other);
  for (const at::TensorBase* const tensor : {first, second}) {
    if (tensor == nullptr || !tensor->defined() || !tensor->unsafeGetTensorImpl()->version_counter().enabled()) {
      Py_RETURN_NONE;
    }
  }
  c10::VariableVersion counter = first->unsafeGetTensorImpl()->version_counter();
  const auto version = counter.current_version();
  if (version_of(*second) != version) {
    Py_RETURN_FALSE;
  }
  counter.set_version(version + 1);
  const bool shared = version_of(*second) != version;
  counter.set_version(version);
  return PyBool_FromLong(shared);
}

PyMethodDef functions[] = {
    {"setup", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(setup)), METH_VARARGS | METH_KEYWORDS,
     "Tell the module of PyTorch's types and of the package. Once, before all else."},
    {"same_counter", same_counter, METH_VARARGS, "Whether two tensors share a version counter; None if it is not known."},
    {"finalizer", finalizer, METH_O, "A `__del__` that runs a function whole, and lets no interrupt be lost in it."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "actoffload_hooks", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

void describe_types() {
  describe(&kept_type, "actoffload_hooks.Kept", sizeof(Kept), kept_dealloc,
           "A saved tensor that stays where it is, and the version at which it was saved.");
  kept_type.tp_flags |= Py_TPFLAGS_DISALLOW_INSTANTIATION;
  kept_type.tp_methods = kept_methods;

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
  text_append = PyUnicode_InternFromString("append");
  text_parameter = PyUnicode_InternFromString("parameter");
  text_input = PyUnicode_InternFromString("input");
  text_cpu = PyUnicode_InternFromString("cpu");
  text_name = PyUnicode_InternFromString("__name__");
  text_engine = PyUnicode_InternFromString("torch.autograd.graph");
  describe_types();
  Ref made(PyModule_Create(&module));
  if (!text_append || !text_parameter || !text_input || !text_cpu || !text_name || !text_engine || !made ||
      PyModule_AddType(made.get(), &kept_type) < 0 || PyModule_AddType(made.get(), &pack_type) < 0 ||
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
