// A simulated accelerator as a PyTorch device of the kind PrivateUse1, written against PyTorch's extension interface.
//
// Device memory is host memory that only streams touch. A stream is a thread that runs its tasks in order. A kernel is
// queued: the shapes of its outputs come from the Meta backend, and the CPU kernel does the work later, by address, as
// on a real device. So a missing edge between two streams shows as wrong bytes. The caching allocator fills each block
// with 0xFF, in the order of the stream that gets it: a late read sees NaN. An access to memory before it belongs to the
// tensor, or after it has a new owner, also counts as a violation.
//
// A lazy stream does nothing before another stream or the host waits for it. Other streams run ahead of it as far as
// they can, so a missing edge to it shows in every run.
//
// Each stream has a clock: a task begins when its stream, the events that it waits for and the host are there, and takes
// as long as a model of a GPU says. These virtual times depend on no real time.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <unordered_map>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr size_t kAlignment = 512;
constexpr c10::StreamId kStreams = 32;  // of each device, beside the default one; they are handed out in turn

std::atomic<int64_t> violations{0};

// -- streams and events -----------------------------------------------------------------------------------------------

// See `SimulatedDevice.model` in simulated_device.py.
struct Model {
  double flops = 1e13, memory_bytes_per_s = 1e12, to_device_bytes_per_s = 1e10, to_host_bytes_per_s = 1e10;
  double latency_s = 1e-5, launch_s = 0;
} model;
double longest_delay_s = 0;

struct Queue;

// A point in the work of a stream.
struct Moment {
  Queue* queue = nullptr;
  uint64_t number = 0;  // how many tasks the queue has run when it has come
  bool done = false;
  double time = 0;
  std::vector<Queue*> awaited_by = {};
};
using MomentPtr = std::shared_ptr<Moment>;

struct Task {
  std::function<void()> run;
  MomentPtr after;   // the task waits for it; may be null
  MomentPtr moment;  // the task brings it about; may be null
  double duration = 0;
  double launched = 0;
};

struct Queue {
  int device;
  c10::StreamId id;
  std::condition_variable wake;
  std::deque<Task> tasks;
  bool busy = false;
  bool paused = false;
  bool lazy = false;
  uint64_t given = 0, ran = 0, wanted = 0;  // counts of tasks; a lazy queue runs those that are wanted
  double clock = 0;
  std::mt19937_64 random;
  double delay_probability = 0;

  Queue(int device, c10::StreamId id) : device(device), id(id) {}

  // Some streams are never delayed, some now and then, some at nearly every task.
  void seed(uint64_t number) {
    constexpr double kProbabilities[] = {0, 0.3, 0.9};
    random.seed(number * 1000003 + static_cast<uint64_t>(device) * 1009 + static_cast<uint64_t>(id));
    random.discard(16);
    delay_probability = kProbabilities[random() % 3];
  }

  void want(uint64_t number) {
    if (number > wanted) {
      wanted = number;
      wake.notify_one();
    }
  }

  // Whether the first task may begin. The tasks that it waits for are wanted from now on.
  bool ready() {
    if (paused || tasks.empty() || (lazy && ran >= wanted)) {
      return false;
    }
    const MomentPtr& after = tasks.front().after;
    if (!after || after->done) {
      return true;
    }
    if (after->awaited_by.empty() || after->awaited_by.back() != this) {
      after->awaited_by.push_back(this);
    }
    after->queue->want(after->number);
    return false;
  }
};

// All streams. One mutex guards them; it is not held while a task runs.
struct Machine {
  std::mutex mutex;
  std::condition_variable changed;                         // for threads of the host
  std::map<std::pair<int, c10::StreamId>, Queue*> queues;  // never freed: threads run them until the process ends
  c10::StreamId next_id[kDevices] = {};
  double host_clock = 0;
  uint64_t seed = 0;
  std::string error;  // the first error of a kernel; the next synchronization raises it

  Queue& queue(const c10::Stream& stream) { return queue(stream.device_index(), stream.id()); }

  Queue& queue(int device, c10::StreamId id) {  // with the mutex held
    Queue*& found = queues[{device, id}];
    if (found == nullptr) {
      found = new Queue(device, id);
      found->seed(seed);
      std::thread(&Machine::work, this, std::ref(*found)).detach();
    }
    return *found;
  }

  void set(int device, c10::StreamId id, bool Queue::*option, bool value) {
    const std::lock_guard<std::mutex> guard(mutex);
    Queue& to = queue(device, id);
    to.*option = value;
    to.wake.notify_one();
  }

  void add(const c10::Stream& stream, Task task) {
    const std::lock_guard<std::mutex> guard(mutex);
    Queue& to = queue(stream);
    ++to.given;
    host_clock += task.run ? model.launch_s : 0;
    task.launched = host_clock;
    if (task.moment) {
      task.moment->queue = &to;
      task.moment->number = to.given;
    }
    to.tasks.push_back(std::move(task));
    to.wake.notify_one();
  }

  void work(Queue& queue) {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      queue.wake.wait(lock, [&] { return queue.ready(); });
      Task task = std::move(queue.tasks.front());
      queue.tasks.pop_front();
      queue.busy = true;
      std::uniform_real_distribution<> chance;
      const bool delayed = longest_delay_s > 0 && chance(queue.random) < queue.delay_probability;
      const double delay_s = delayed ? longest_delay_s * chance(queue.random) : 0;
      std::string failed;
      if (delayed || task.run) {
        lock.unlock();
        if (delayed) {
          std::this_thread::sleep_for(std::chrono::duration<double>(delay_s));
        }
        if (task.run) {
          try {
            task.run();
          } catch (const std::exception& error) {
            failed = error.what();
          }
          task.run = nullptr;
        }
        lock.lock();
      }
      double begin = std::max(queue.clock, task.launched);
      if (task.after) {
        begin = std::max(begin, task.after->time);
      }
      queue.clock = begin + task.duration;
      if (task.moment) {
        task.moment->done = true;
        task.moment->time = queue.clock;
        for (Queue* other : task.moment->awaited_by) {
          other->wake.notify_one();
        }
      }
      if (!failed.empty() && error.empty()) {
        error = failed;
      }
      ++queue.ran;
      queue.busy = false;
      changed.notify_all();
    }
  }

  MomentPtr record(const c10::Stream& stream) {
    auto moment = std::make_shared<Moment>();
    add(stream, Task{nullptr, nullptr, moment});
    return moment;
  }

  void wait_for(const MomentPtr& moment) {
    std::unique_lock<std::mutex> lock(mutex);
    moment->queue->want(moment->number);
    changed.wait(lock, [&] { return moment->done; });
    host_clock = std::max(host_clock, moment->time);
    raise(lock);
  }

  // Where the host takes time, whether it has come by the host's clock, whatever real time it takes.
  bool is_done(const MomentPtr& moment) {
    std::unique_lock<std::mutex> lock(mutex);
    if (model.launch_s > 0) {
      changed.wait(lock, [&] { return moment->done; });
      return moment->time <= host_clock;
    }
    return moment->done;
  }

  // Waits for the tasks that were there when it was called. Another thread may add some meanwhile: a lazy stream would
  // run those for nobody, so a wait for an empty queue could last for ever.
  void synchronize(int device, const c10::Stream* only = nullptr) {
    std::unique_lock<std::mutex> lock(mutex);
    std::vector<std::pair<const Queue*, uint64_t>> chosen;
    for (auto& [key, queue] : queues) {
      if (key.first == device && (only == nullptr || key.second == only->id())) {
        chosen.emplace_back(queue, queue->given);
        queue->want(queue->given);
      }
    }
    for (const auto& [queue, given] : chosen) {
      changed.wait(lock, [queue = queue, given = given] { return queue->ran >= given; });
      host_clock = std::max(host_clock, queue->clock);
    }
    raise(lock);
  }

  void synchronize_all() {
    for (int device = 0; device < kDevices; ++device) {
      synchronize(device);
    }
  }

  bool is_idle(const c10::Stream& stream) {
    const std::lock_guard<std::mutex> guard(mutex);
    const Queue& found = queue(stream);
    return found.tasks.empty() && !found.busy;
  }

  void raise(std::unique_lock<std::mutex>& lock) {
    if (!error.empty()) {
      const std::string text = std::move(error);
      error.clear();
      lock.unlock();
      TORCH_CHECK(false, "simulated device: a kernel failed: ", text);
    }
  }
};

Machine& machine = *new Machine;  // never destroyed, as are all globals of this kind: its threads outlive main

thread_local int current_device = 0;
std::atomic<int64_t> calls[kDevices] = {};  // that make a context on the device, on CUDA
thread_local c10::StreamId current_streams[kDevices] = {};

c10::Device device_of(int index) { return {kSim, static_cast<c10::DeviceIndex>(index)}; }

c10::Stream current_stream(int device) {
  return c10::Stream(c10::Stream::UNSAFE, device_of(device), current_streams[device]);
}

c10::Stream current_stream() { return current_stream(current_device); }

int checked(c10::DeviceIndex index) {
  TORCH_CHECK(index < kDevices, "simulated device: there is no device ", int(index), ", only ", kDevices);
  return index < 0 ? current_device : index;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_of(current_device); }
  void setDevice(c10::Device device) const override {
    current_device = checked(device.index());
    ++calls[current_device];
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) {
      current_device = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(checked(device.index())); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_of(checked(device.index())));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const int index = checked(device.index());
    const std::lock_guard<std::mutex> guard(machine.mutex);
    c10::StreamId& next = machine.next_id[index];
    next = next % kStreams + 1;
    return c10::Stream(c10::Stream::UNSAFE, device_of(index), next);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override { return machine.is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { machine.synchronize(stream.device_index(), &stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { machine.synchronize(checked(device)); }

  // PyTorch makes another device current for such a call, and then the one that was.
  static void call(int device) {
    ++calls[device];
    ++calls[current_device];
  }

  // An event is a pointer to the moment that was recorded last.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    call(stream.device_index());
    if (*event == nullptr) {
      *event = new MomentPtr;
    }
    *static_cast<MomentPtr*>(*event) = machine.record(stream);
  }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    call(device);
    delete static_cast<MomentPtr*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    call(stream.device_index());
    if (event != nullptr) {
      machine.add(stream, Task{nullptr, *static_cast<MomentPtr*>(event), nullptr});
    }
  }
  bool queryEvent(void* event) const override {
    ++calls[current_device];
    return event == nullptr || machine.is_done(*static_cast<MomentPtr*>(event));
  }
  void synchronizeEvent(void* event) const override {
    ++calls[current_device];
    if (event != nullptr) {
      machine.wait_for(*static_cast<MomentPtr*>(event));
    }
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex device) const override {
    call(device);
    return 1e3 * ((*static_cast<MomentPtr*>(end))->time - (*static_cast<MomentPtr*>(begin))->time);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- memory -----------------------------------------------------------------------------------------------------------

struct Block {
  void* address;
  size_t size;
  c10::Stream owner;
  std::vector<c10::Stream> used_on = {};
  uint64_t use = 0;                  // counts the tensors that have had this block
  std::atomic<uint64_t> reached{0};  // the latest of them that a stream has come to

  Block(void* address, size_t size, c10::Stream owner) : address(address), size(size), owner(owner) {}
};

// Blocks are cached by the stream that owns them, whole. A block that `record_stream` names waits for those streams.
struct Allocator final : c10::DeviceAllocator {
  std::mutex mutex;
  std::map<std::pair<int, c10::StreamId>, std::multimap<size_t, Block*>> cached;
  std::vector<std::pair<Block*, std::vector<MomentPtr>>> lent;
  size_t reserved[kDevices] = {}, limit[kDevices];
  c10::CachingDeviceAllocator::DeviceStats stats[kDevices];
  std::atomic<int64_t> flushes{0};

  Allocator() { std::fill(std::begin(limit), std::end(limit), size_t(1) << 40); }

  c10::DataPtr allocate(size_t nbytes) override {
    const int index = current_device;
    const c10::Device device = device_of(index);
    if (nbytes == 0) {
      return {nullptr, device};
    }
    const c10::Stream stream = current_stream(index);
    const size_t size = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    Block* block = take(stream, size);
    if (block == nullptr) {
      block = reserve(stream, size);
    }
    {
      const std::lock_guard<std::mutex> guard(mutex);
      stats[index].allocated_bytes[0].increase(block->size);
      stats[index].active_bytes[0].increase(block->size);
      stats[index].allocation[0].increase(1);
    }
    const uint64_t use = ++block->use;
    auto poison = [block, use] {
      block->reached = use;
      std::memset(block->address, 0xFF, block->size);
    };
    machine.add(stream, Task{poison, nullptr, nullptr});
    return {block->address, block, &Allocator::release, device};
  }

  Block* take(const c10::Stream& stream, size_t size) {
    const std::lock_guard<std::mutex> guard(mutex);
    return_lent(false);
    auto& blocks = cached[{stream.device_index(), stream.id()}];
    auto found = blocks.lower_bound(size);
    if (found == blocks.end() || found->first > size + size / 4) {
      return nullptr;
    }
    found = std::prev(blocks.upper_bound(found->first));  // the one that was freed last
    Block* const block = found->second;
    blocks.erase(found);
    return block;
  }

  Block* reserve(const c10::Stream& stream, size_t size) {
    const int index = stream.device_index();
    for (int attempt = 0;; ++attempt) {
      {
        const std::lock_guard<std::mutex> guard(mutex);
        if (reserved[index] + size <= limit[index]) {
          void* address = nullptr;
          TORCH_CHECK(posix_memalign(&address, 4096, size) == 0, "simulated device: the host has no memory");
          reserved[index] += size;
          stats[index].reserved_bytes[0].increase(size);
          return new Block(address, size, stream);
        }
        if (attempt > 0) {
          ++stats[index].num_ooms;
          TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated device: out of memory: ", size, " bytes were asked for, ",
                           reserved[index], " of ", limit[index], " are reserved");
        }
        ++stats[index].num_alloc_retries;
      }
      emptyCache();
    }
  }

  static void release(void* context);

  void put(Block* block) {  // with the mutex held
    cached[{block->owner.device_index(), block->owner.id()}].emplace(block->size, block);
  }

  void return_lent(bool wait) {  // with the mutex held
    for (auto it = lent.begin(); it != lent.end();) {
      bool free = true;
      for (const MomentPtr& moment : it->second) {
        if (wait) {
          machine.wait_for(moment);
        }
        free = free && machine.is_done(moment);
      }
      if (free) {
        put(it->first);
        it = lent.erase(it);
      } else {
        ++it;
      }
    }
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* destination, const void* source, size_t count) const override {
    machine.synchronize(current_device);
    std::memcpy(destination, source, count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    machine.synchronize_all();
    const std::lock_guard<std::mutex> guard(mutex);
    ++flushes;
    return_lent(true);
    for (auto& [stream, blocks] : cached) {
      for (auto& [size, block] : blocks) {
        reserved[stream.first] -= size;
        stats[stream.first].reserved_bytes[0].decrease(size);
        std::free(block->address);
        delete block;
      }
      blocks.clear();
    }
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get_context() != nullptr) {
      auto* const block = static_cast<Block*>(pointer.get_context());
      const std::lock_guard<std::mutex> guard(mutex);
      if (stream != block->owner) {
        block->used_on.push_back(stream);
      }
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> guard(mutex);
    return stats[checked(device)];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> guard(mutex);
    stats[checked(device)].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> guard(mutex);
    auto& s = stats[checked(device)];
    s.allocated_bytes[0].reset_peak();
    s.reserved_bytes[0].reset_peak();
    s.active_bytes[0].reset_peak();
  }
  // Virtual from PyTorch 2.10 on.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    const std::lock_guard<std::mutex> guard(mutex);
    const size_t most = limit[checked(device)];  // it may have been set below what is reserved
    return {most - std::min(most, reserved[device]), most};
  }
};

Allocator& allocator = *new Allocator;

void Allocator::release(void* context) {
  auto* const block = static_cast<Block*>(context);
  const std::lock_guard<std::mutex> guard(allocator.mutex);
  auto& stats = allocator.stats[block->owner.device_index()];
  stats.allocated_bytes[0].decrease(block->size);
  stats.active_bytes[0].decrease(block->size);
  if (block->used_on.empty()) {
    allocator.put(block);
    return;
  }
  std::vector<MomentPtr> moments;
  for (const c10::Stream& stream : block->used_on) {
    moments.push_back(machine.record(stream));
  }
  block->used_on.clear();
  allocator.lent.emplace_back(block, std::move(moments));
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const {
  allocator.recordStream(pointer, stream);
}

// Host memory that a stream may read and write by itself: registered by us, or given out by the pinned allocator.
struct PageLocked {
  std::mutex mutex;
  std::map<uintptr_t, size_t> ranges;

  bool has(const void* pointer, size_t nbytes = 1) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const std::lock_guard<std::mutex> guard(mutex);
    auto range = ranges.upper_bound(address);
    return range != ranges.begin() && address + nbytes <= (--range)->first + range->second;
  }
  bool add(uintptr_t address, size_t nbytes) {
    const std::lock_guard<std::mutex> guard(mutex);
    auto above = ranges.lower_bound(address);
    const bool below = above != ranges.begin() && std::prev(above)->first + std::prev(above)->second > address;
    if (below || (above != ranges.end() && above->first < address + nbytes)) {
      ++violations;  // other memory was mapped here, and was unmapped while it was page-locked
      return false;
    }
    return ranges.emplace(address, nbytes).second;
  }
  bool remove(uintptr_t address) {
    const std::lock_guard<std::mutex> guard(mutex);
    return ranges.erase(address) != 0;
  }
};

PageLocked& page_locked = *new PageLocked;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 4096, std::max<size_t>(nbytes, 1)) == 0, "the host has no memory");
    page_locked.add(reinterpret_cast<uintptr_t>(address), nbytes);
    return {address, address, &PinnedAllocator::release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* address) {
    machine.synchronize_all();
    page_locked.remove(reinterpret_cast<uintptr_t>(address));
    std::free(address);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::release; }
  void copy_data(void* destination, const void* source, size_t count) const override {
    std::memcpy(destination, source, count);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = checked(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const int before = current_device;
    current_device = checked(device);
    return static_cast<c10::DeviceIndex>(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return page_locked.has(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator* const made = new PinnedAllocator;
    return made;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::CPU));
  }
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const override {
    return at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::CPU)).clone();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    const c10::OptionalDeviceGuard guard(storage.device());
    c10::DataPtr fresh = allocator.allocate(nbytes);
    const size_t kept = std::min(nbytes, storage.nbytes());
    if (kept != 0) {
      void* const to = fresh.get();
      const void* const from = storage.data();
      machine.add(current_stream(), Task{[to, from, kept] { std::memcpy(to, from, kept); }});
    }
    c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
  }
};

// -- kernels ----------------------------------------------------------------------------------------------------------

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// A tensor without its memory's ownership, as a kernel has it.
struct View {
  void* address;
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;
  Block* block = nullptr;
  uint64_t use = 0;

  explicit View(const at::Tensor& tensor)
      : address(tensor.storage().mutable_data() == nullptr
                    ? nullptr
                    : static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * tensor.element_size()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        type(tensor.scalar_type()) {
    const c10::DataPtr& pointer = tensor.storage().data_ptr();
    if (pointer.get_deleter() == &Allocator::release) {
      block = static_cast<Block*>(pointer.get_context());
      use = block->use;
    }
  }

  at::Tensor open() const {
    if (block != nullptr && block->reached != use) {
      ++violations;  // the memory is not yet, or no longer, that of the tensor
    }
    const auto options = at::TensorOptions().dtype(type).device(at::kCPU);
    return address == nullptr ? at::empty_strided(sizes, strides, options) : at::from_blob(address, sizes, strides, options);
  }
};

at::Tensor as_meta(const at::Tensor& tensor, std::unordered_map<c10::TensorImpl*, at::Tensor>& known) {
  at::Tensor& found = known[tensor.unsafeGetTensorImpl()];
  if (!found.defined()) {
    found = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  }
  return found;
}

// Apply `change` to each tensor of an argument, also inside of lists.
template <typename Change>
c10::IValue map_tensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(change(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(change(*tensor)) : tensor);
    }
    return list;
  }
  return value;
}

double seconds_of(const std::string& name, const std::vector<View>& inputs, const std::vector<View>& outputs) {
  double elements = 0;
  for (const auto* views : {&inputs, &outputs}) {
    for (const View& view : *views) {
      elements += static_cast<double>(c10::multiply_integers(view.sizes)) * static_cast<double>(c10::elementSize(view.type));
    }
  }
  double seconds = elements / model.memory_bytes_per_s;
  static const std::set<std::string> matrix_products = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
  if (matrix_products.count(name) != 0) {
    const bool into = outputs.empty();  // the form with an argument for its output, the last tensor
    const View& result = into ? inputs.back() : outputs[0];
    const View& right = inputs[inputs.size() - (into ? 2 : 1)];
    const int64_t inner = right.sizes[right.sizes.size() - 2];
    seconds = std::max(seconds, 2.0 * static_cast<double>(c10::multiply_integers(result.sizes) * inner) / model.flops);
  }
  return seconds + model.latency_s;
}

// The results of an operator: for each value its tensors, which are new ones or arguments.
struct Outline {
  struct Result {
    bool defined = true;
    int64_t argument = -1;  // which of the tensors among the arguments; -1 for a new one
    std::vector<int64_t> sizes = {}, strides = {};
    at::ScalarType type = at::kFloat;
  };
  struct Value {
    bool list;
    std::vector<Result> results = {};
  };
  bool possible = true;
  std::vector<Value> values = {};
};

// All that the shapes of the results depend on, as text.
std::string key_of(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  std::ostringstream key;
  key << std::hexfloat << op.operator_name();
  std::unordered_map<c10::TensorImpl*, size_t> places;
  for (const c10::IValue& argument : arguments) {
    key << '|';
    bool tensors = false;
    map_tensors(argument, [&](const at::Tensor& tensor) {
      tensors = true;
      c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
      key << places.emplace(impl, places.size()).first->second << tensor.sizes() << tensor.strides() << tensor.dtype()
          << impl->is_wrapped_number() << ';';
      return tensor;
    });
    if (!tensors && !argument.isGenerator()) {
      key << argument.tagKind() << argument;
    }
  }
  return key.str();
}

// Have the Meta backend tell the results; not possible where they depend on values, or share memory with an argument.
Outline outline_of(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  torch::jit::Stack metas;
  std::unordered_map<c10::TensorImpl*, at::Tensor> known;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;  // of the arguments, with their meta tensors
  for (const c10::IValue& argument : arguments) {
    if (argument.isDevice()) {
      metas.emplace_back(c10::Device(at::kMeta));
      continue;
    }
    metas.push_back(map_tensors(argument, [&](const at::Tensor& tensor) {
      tensors.emplace_back(tensor, on_device(tensor) ? as_meta(tensor, known) : tensor);
      return tensors.back().second;
    }));
  }
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&metas);
  } catch (const std::exception&) {
    return Outline{false};
  }
  Outline outline;
  for (const c10::IValue& value : metas) {
    outline.values.push_back({value.isTensorList()});
    for (const at::Tensor& shape : value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>{value.toTensor()}) {
      Outline::Result result{shape.defined()};
      for (size_t i = 0; shape.defined() && i < tensors.size(); ++i) {
        const auto& [original, meta] = tensors[i];
        if (meta.is_same(shape)) {
          result.argument = result.argument < 0 ? static_cast<int64_t>(i) : result.argument;
          outline.possible = outline.possible && original.sizes() == shape.sizes();
        } else if (meta.has_storage() && shape.has_storage() && meta.is_alias_of(shape)) {
          outline.possible = false;
        }
      }
      if (shape.defined()) {
        result.sizes = shape.sizes().vec();
        result.strides = shape.strides().vec();
        // The CPU's norms have their statistics in the type of the input, which the Meta backend does not know.
        const std::string& name = op.schema().name();
        const bool norm = name == "aten::native_layer_norm" || name == "aten::native_group_norm";
        result.type = norm ? tensors[0].first.scalar_type() : shape.scalar_type();
      }
      outline.values.back().results.push_back(std::move(result));
    }
  }
  return outline;
}

const Outline& cached_outline(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  static std::mutex mutex;
  static std::unordered_map<std::string, Outline> outlines;
  const std::string key = key_of(op, arguments);
  {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto found = outlines.find(key);
    if (found != outlines.end()) {
      return found->second;
    }
  }
  Outline outline = outline_of(op, arguments);  // without the lock: it may run Python
  const std::lock_guard<std::mutex> guard(mutex);
  return outlines.emplace(key, std::move(outline)).first->second;
}

// Queue an operator on the current stream; false where its outputs cannot be known before it has run.
bool launch(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  for (const auto& returned : schema.returns()) {
    const auto kind = returned.type()->kind();
    const bool list = kind == c10::TypeKind::ListType && returned.type()->containedType(0)->kind() == c10::TypeKind::TensorType;
    if (kind != c10::TypeKind::TensorType && !list) {
      return false;
    }
  }
  const torch::jit::Stack arguments = torch::jit::last(*stack, count).vec();
  std::vector<at::Tensor> tensors;
  bool fits = true;
  for (const c10::IValue& argument : arguments) {
    map_tensors(argument, [&](const at::Tensor& tensor) {
      tensors.push_back(tensor);
      fits = fits && tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg();
      fits = fits && (on_device(tensor) || tensor.dim() == 0);  // a number; a larger one lies where a stream must not look
      return tensor;
    });
  }
  if (!fits) {
    return false;
  }
  const Outline& outline = cached_outline(op, arguments);
  if (!outline.possible) {
    return false;
  }
  std::vector<View> inputs, outputs;
  // Tensors of the device become their views when the kernel runs; until then an empty tensor stands for each.
  torch::jit::Stack kernel;
  std::vector<std::optional<View>> views;  // of each tensor; none for a number
  for (const c10::IValue& argument : arguments) {
    if (argument.isDevice()) {
      kernel.emplace_back(c10::Device(at::kCPU));
      continue;
    }
    kernel.push_back(map_tensors(argument, [&](const at::Tensor& tensor) {
      if (on_device(tensor)) {
        inputs.emplace_back(tensor);
        views.emplace_back(inputs.back());
        return at::Tensor(at::empty({0}));
      }
      views.emplace_back(std::nullopt);
      return tensor.clone();
    }));
  }
  torch::jit::Stack results;
  std::vector<std::optional<View>> targets;  // of each result, where its bytes go; none for an argument
  for (const Outline::Value& value : outline.values) {
    std::vector<at::Tensor> made;
    for (const Outline::Result& result : value.results) {
      if (result.defined && result.argument < 0) {
        const auto options = at::dtype(result.type).device(device_of(current_device));
        made.push_back(at::empty_strided(result.sizes, result.strides, options));
        outputs.emplace_back(made.back());
        targets.emplace_back(outputs.back());
        continue;
      }
      made.push_back(result.defined ? tensors[static_cast<size_t>(result.argument)] : at::Tensor());
      if (result.defined || value.list) {
        targets.emplace_back(std::nullopt);
      }
    }
    results.push_back(value.list ? c10::IValue(c10::List<at::Tensor>(made)) : c10::IValue(made[0]));
  }
  const double seconds = seconds_of(schema.name(), inputs, outputs);
  auto run = [op, kernel = std::move(kernel), views = std::move(views), targets = std::move(targets)] {
    c10::InferenceMode inference(true);
    at::AutoDispatchBelowADInplaceOrView below;
    torch::jit::Stack opened;
    size_t place = 0;
    for (const c10::IValue& argument : kernel) {
      opened.push_back(map_tensors(argument, [&](const at::Tensor& tensor) {
        const auto& view = views[place++];
        return view ? view->open() : tensor;
      }));
    }
    op.callBoxed(&opened);
    place = 0;
    for (const c10::IValue& result : opened) {
      map_tensors(result, [&](const at::Tensor& tensor) {
        const auto& target = targets[place++];
        if (target) {
          target->open().copy_(tensor);
        }
        return tensor;
      });
    }
  };
  machine.add(current_stream(), Task{std::move(run), nullptr, nullptr, seconds});
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), results.begin(), results.end());
  return true;
}

// The random numbers of each device: a kernel gets a generator of its own when it is queued, as it runs later.
struct Random {
  uint64_t seed = 0, count = 0;

  uint64_t next() {  // splitmix64
    uint64_t bits = seed + ++count * 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
  }
} randoms[kDevices];
std::mutex random_mutex;

void give_generator(const c10::FunctionSchema& schema, torch::jit::Stack* stack) {
  const size_t count = schema.arguments().size();
  for (size_t i = 0; i < count; ++i) {
    c10::TypePtr type = schema.arguments()[i].type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    if (type->kind() != c10::TypeKind::GeneratorType) {
      continue;
    }
    c10::IValue& given = torch::jit::peek(*stack, i, count);
    const std::lock_guard<std::mutex> guard(random_mutex);
    given = at::detail::createCPUGenerator(
        given.isNone() ? randoms[current_device].next()
                       : at::check_generator<at::CPUGeneratorImpl>(given.toGenerator())->random64());
  }
}

int64_t synchronous = 0;  // kernels that could not be queued

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::OptionalDeviceGuard guard;
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    std::optional<c10::Device> found;
    map_tensors(value, [&](const at::Tensor& tensor) {
      if (on_device(tensor) && !found) {
        found = tensor.device();
      }
      return tensor;
    });
    if (value.isDevice() && value.toDevice().type() == kSim) {
      found = value.toDevice();
    }
    if (found) {
      guard.reset_device(*found);
      break;
    }
  }
  give_generator(op.schema(), stack);
  if (!launch(op, stack)) {
    ++synchronous;
    at::native::cpu_fallback(op, stack);
  }
}

// The CPU has none for whole numbers, which mixtures of experts need.
void histc(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::IValue& input = torch::jit::peek(*stack, 0, op.schema().arguments().size());
  const at::ScalarType type = input.toTensor().scalar_type();
  if (!at::isIntegralType(type, false)) {
    fallback(op, stack);
    return;
  }
  input = input.toTensor().to(at::kDouble);
  fallback(op, stack);
  stack->back() = stack->back().toTensor().to(type);
}

at::Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<at::Device> device, std::optional<bool>,
                               std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
}

bool is_page_locked(const at::Tensor& tensor) {
  return tensor.numel() == 0 || page_locked.has(tensor.storage().data(), tensor.storage().nbytes());
}

// As CUDA does it: from and to page-locked memory the host does not wait; other memory is copied at once.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  if (destination.numel() == 0) {
    return destination;
  }
  const bool inward = on_device(destination), outward = on_device(source);
  const c10::OptionalDeviceGuard guard(inward ? destination.device() : source.device());
  const at::Tensor from = source.expand_as(destination);
  const auto nbytes = static_cast<double>(destination.numel() * destination.element_size());
  double rate = model.memory_bytes_per_s;
  bool waits = false;
  if (inward != outward) {
    rate = inward ? model.to_device_bytes_per_s : model.to_host_bytes_per_s;
    waits = !non_blocking || !is_page_locked(inward ? source : destination);
  }
  const bool conj = from.is_conj() != destination.is_conj(), neg = from.is_neg() != destination.is_neg();
  const at::Tensor& on_host = inward ? source : destination;
  const void* const locked = inward != outward && !waits ? on_host.storage().data() : nullptr;
  auto run = [read = View(from), write = View(destination), conj, neg, locked] {
    if (locked != nullptr && !page_locked.has(locked)) {
      ++violations;
      return;
    }
    c10::InferenceMode inference(true);
    at::Tensor bytes = read.open();
    bytes = conj ? at::conj_physical(bytes) : bytes;
    write.open().copy_(neg ? at::neg(bytes) : bytes);
  };
  const c10::Stream stream = current_stream();
  const bool between = inward && outward && source.device() != destination.device();
  const c10::Stream other = between ? current_stream(source.device().index()) : stream;
  if (between) {  // each of the two waits for the other
    machine.add(stream, Task{nullptr, machine.record(other), nullptr});
  }
  machine.add(stream, Task{run, nullptr, nullptr, nbytes / rate + model.latency_s});
  if (between) {
    machine.add(other, Task{nullptr, machine.record(stream), nullptr});
  }
  if (waits) {
    machine.wait_for(machine.record(stream));
  }
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  at::Tensor host = at::empty({}, self.options().device(at::kCPU));
  copy_from(self, host, false);
  return host.item();
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const size_t needed = (self.storage_offset() + self.numel()) * self.element_size();
  if (needed > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                    offset.guard_int(__FILE__, __LINE__));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const int64_t count = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage(self, std::move(storage), 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}

void record_stream(at::Tensor& self, at::Stream stream) { allocator.recordStream(self.storage().data_ptr(), stream); }

int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;  // the mathematical one: it is made of operators that every backend has
}

// Of operators that every backend has; they take their random numbers one by one.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (p == 0 || !train.value_or(true)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  const at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0 : 1 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// A copy makes conjugates and negatives real itself; PyTorch would clone them first, which is a copy again.
// Autograd asks these of a strided nested tensor where an exception would end the process.
TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) {
  m.impl("_nested_tensor_size", TORCH_FN(at::native::_nested_tensor_size));
  m.impl("_nested_tensor_strides", TORCH_FN(at::native::_nested_tensor_strides));
  m.impl("_nested_tensor_storage_offsets", TORCH_FN(at::native::_nested_tensor_storage_offsets));
}

TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("record_stream", &record_stream);
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
  m.impl("_fused_sdp_choice", &sdp_choice);
  m.impl("native_dropout", &dropout);
  // Without a kernel PyTorch would compose these of other operators, or of some that only this kind of device has.
  for (const char* name : {"native_layer_norm", "native_group_norm", "convolution", "convolution_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace

extern "C" {

// Register the device with PyTorch; once.
void actoffload_sim_install() {
  c10::SetAllocator(kSim, &allocator, 1);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

void actoffload_sim_configure(const Model* wanted) {
  const std::lock_guard<std::mutex> guard(machine.mutex);
  model = *wanted;
}

// The longest delay of a task, 0 for none; restarts the random numbers of every stream.
void actoffload_sim_delays(double longest_s, uint64_t seed) {
  const std::lock_guard<std::mutex> guard(machine.mutex);
  longest_delay_s = longest_s;
  machine.seed = seed;
  for (auto& [key, queue] : machine.queues) {
    queue->seed(seed);
  }
}

void actoffload_sim_pause(int device, int64_t stream, int paused) {
  machine.set(device, stream, &Queue::paused, paused != 0);
}

void actoffload_sim_lazy(int device, int64_t stream, int lazy) { machine.set(device, stream, &Queue::lazy, lazy != 0); }

// How often memory was touched that was not, or no longer, that of the tensor; since the last call.
int64_t actoffload_sim_violations() { return violations.exchange(0); }

void actoffload_sim_limit(int device, size_t nbytes) {
  const std::lock_guard<std::mutex> guard(allocator.mutex);
  allocator.limit[device] = nbytes;
}

int actoffload_sim_register(uintptr_t address, size_t nbytes) {
  ++calls[current_device];
  return page_locked.add(address, nbytes) ? 1 : 0;
}

int actoffload_sim_unregister(uintptr_t address) {
  ++calls[current_device];
  machine.synchronize_all();
  return page_locked.remove(address) ? 1 : 0;
}

// Have the host be busy for so long in virtual time.
void actoffload_sim_host(double seconds) {
  const std::lock_guard<std::mutex> guard(machine.mutex);
  machine.host_clock += seconds;
}

// Virtual seconds at which the host is.
double actoffload_sim_clock() {
  const std::lock_guard<std::mutex> guard(machine.mutex);
  return machine.host_clock;
}

// The state of a device's random numbers; or set it.
void actoffload_sim_random(int device, uint64_t* state, int set) {
  const std::lock_guard<std::mutex> guard(random_mutex);
  Random& random = randoms[device];
  if (set != 0) {
    random.seed = state[0];
    random.count = state[1];
  }
  state[0] = random.seed;
  state[1] = random.count;
}

// Have the current stream do nothing for so long, in real time.
void actoffload_sim_sleep(double seconds) {
  machine.add(current_stream(), Task{[seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); },
                                       nullptr, nullptr, seconds});
}

int64_t actoffload_sim_calls(int device) { return calls[device]; }

int64_t actoffload_sim_synchronous() { return synchronous; }

int64_t actoffload_sim_flushes() { return allocator.flushes; }
}
