// PyTorch's memory for large CPU tensors, kept by the process from one tensor to the next.
//
// glibc either keeps freed activations where nothing of their size fits any more (posix_memalign leaves pieces of a few
// dozen bytes between the blocks) or, with a low mmap threshold, gives every block back to the kernel and takes the next
// one from it page by page. Here a freed block joins its free neighbours and the next tensor goes where it fits best;
// memory that nothing has used for some steps goes back to the kernel, and all that is free once nobody offloads.
// Huge pages are made only of what is to be written to disk: they would make a large tensor resident of which only a few
// columns are used.
//
// Small tensors, and whatever does not fit, come from the allocator that was there before.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr std::uintptr_t kPage = 4096;
constexpr std::uintptr_t kChunk = std::uintptr_t{2} << 20;  // memory goes back in pieces of this size

constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1: older headers do not name it

std::uintptr_t round_up(std::uintptr_t value, std::uintptr_t unit) { return (value + unit - 1) / unit * unit; }

// A reserved range of addresses, cut into blocks of whole pages. What lies above `top_` has never been handed out or is
// free again, and is no free range.
class Arena {
 public:
  Arena(std::uintptr_t begin, std::uintptr_t nbytes)
      : begin_(begin), end_(begin + nbytes), top_(begin), touched_(begin), used_(nbytes / kChunk), huge_(nbytes / kChunk) {}

  bool contains(const void* pointer) const {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    return begin_ <= address && address < end_;
  }

  // In the smallest free range that is large enough, of those the lowest; nullptr when there is no room.
  void* allocate(std::size_t nbytes) {
    if (nbytes > end_ - begin_) {
      return nullptr;
    }
    const std::uintptr_t size = round_up(nbytes, kPage);
    const std::lock_guard<std::mutex> guard(lock_);
    std::uintptr_t address = top_;
    const auto fit = by_size_.lower_bound({size, 0});
    if (fit != by_size_.end()) {
      const std::uintptr_t whole = fit->first;
      address = fit->second;
      erase(address, whole);
      if (whole > size) {
        insert(address + size, whole - size);
      }
    } else if (size <= end_ - top_) {
      top_ += size;
    } else {
      return nullptr;
    }
    live_.emplace(address, size);
    live_bytes_ += size;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    recent_peak_bytes_ = std::max(recent_peak_bytes_, live_bytes_);
    mark(address, size, epoch_);
    return reinterpret_cast<void*>(address);
  }

  void release(void* pointer) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    const std::lock_guard<std::mutex> guard(lock_);
    const auto held = held_.find(address);
    if (held != held_.end()) {
      held->second.freed = true;  // `let_go` releases it
      return;
    }
    release_block(address);
  }

  // Keeps a block as it is, though it is freed, until `let_go` was called as often; false where there is no such block.
  // A dense one is written whole, so huge pages make nothing of it resident that was not.
  bool hold(std::uintptr_t address, bool dense) {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto block = live_.find(address);
    if (block == live_.end()) {
      return false;
    }
    ++held_[address].times;
    if (dense) {
      collapse(address, address + block->second);
    }
    return true;
  }

  void let_go(std::uintptr_t address) {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto held = held_.find(address);
    if (held == held_.end() || --held->second.times > 0) {
      return;
    }
    const bool freed = held->second.freed;
    held_.erase(held);
    if (freed) {
      release_block(address);
    }
  }

  // Whether what is freed from now on is kept for the tensors to come.
  void keep(bool keep) {
    const std::lock_guard<std::mutex> guard(lock_);
    keep_ = keep;
  }

  // Gives back what was free during the last `epochs` epochs, and begins a new one.
  void next_epoch(std::uint32_t epochs) {
    const std::lock_guard<std::mutex> guard(lock_);
    for (const auto& [address, size] : free_) {
      give_back(address, address + size, epochs);
    }
    give_back(top_, touched_, epochs);
    ++epoch_;
  }

  void facts(std::uint64_t* found) {
    const std::lock_guard<std::mutex> guard(lock_);
    found[0] = live_bytes_;
    found[1] = peak_bytes_;
    const auto end = used_.begin() + static_cast<std::ptrdiff_t>((touched_ - begin_) / kChunk);
    const auto pages = std::count_if(used_.begin(), end, [](std::uint32_t epoch) { return epoch != 0; });
    found[2] = static_cast<std::uint64_t>(pages) * kChunk;
    found[3] = live_.size();
    found[4] = recent_peak_bytes_;
    recent_peak_bytes_ = live_bytes_;
  }

  std::mutex& lock() { return lock_; }

 private:
  struct Held {
    int times = 0;
    bool freed = false;
  };

  void release_block(std::uintptr_t address) {
    const auto block = live_.find(address);
    if (block == live_.end()) {
      return;
    }
    std::uintptr_t size = block->second;
    live_.erase(block);
    live_bytes_ -= size;
    mark(address, size, epoch_);
    const auto above = free_.find(address + size);
    if (above != free_.end()) {
      const std::uintptr_t more = above->second;
      erase(address + size, more);
      size += more;
    }
    const auto next = free_.lower_bound(address);
    if (next != free_.begin()) {
      const auto [below, more] = *std::prev(next);
      if (below + more == address) {
        erase(below, more);
        address = below;
        size += more;
      }
    }
    if (address + size == top_) {
      top_ = address;
    } else {
      insert(address, size);
    }
    if (!keep_) {
      give_back(address, address + size, 0);
    }
  }

  void insert(std::uintptr_t address, std::uintptr_t size) {
    free_.emplace(address, size);
    by_size_.emplace(size, address);
  }

  void erase(std::uintptr_t address, std::uintptr_t size) {
    free_.erase(address);
    by_size_.erase({size, address});
  }

  void mark(std::uintptr_t address, std::uintptr_t size, std::uint32_t epoch) {
    const auto first = used_.begin() + static_cast<std::ptrdiff_t>((address - begin_) / kChunk);
    const auto last = used_.begin() + static_cast<std::ptrdiff_t>((address + size - 1 - begin_) / kChunk);
    std::fill(first, last + 1, epoch);
    touched_ = std::max(touched_, begin_ + round_up(address + size - begin_, kChunk));
  }

  // Makes huge pages of the chunks that lie wholly in [from, to) and are none yet: what is held is about to be written to
  // disk, and direct I/O takes each page as a piece (1.2 GB/s from small pages, 3.4 GB/s from huge ones, on one machine).
  // No page is added where all of the block was written. Where the kernel refuses, the small pages stay.
  void collapse(std::uintptr_t from, std::uintptr_t to) {
    const std::size_t end = (to - begin_) / kChunk;
    for (std::size_t index = (round_up(from, kChunk) - begin_) / kChunk; index < end; ++index) {
      if (!huge_[index]) {
        huge_[index] = madvise(reinterpret_cast<void*>(begin_ + index * kChunk), kChunk, kCollapse) == 0;
      }
    }
  }

  // The chunks that lie wholly in [from, to), have pages, and were in no block for so many epochs.
  void give_back(std::uintptr_t from, std::uintptr_t to, std::uint32_t epochs) {
    std::size_t index = (round_up(from, kChunk) - begin_) / kChunk;
    const std::size_t end = (to - begin_) / kChunk;
    const auto idle = [&](std::size_t i) { return used_[i] != 0 && used_[i] + epochs <= epoch_; };
    while (index < end) {
      if (!idle(index)) {
        ++index;
        continue;
      }
      std::size_t last = index;
      while (last < end && idle(last)) {
        huge_[last] = false;
        used_[last++] = 0;
      }
      madvise(reinterpret_cast<void*>(begin_ + index * kChunk), (last - index) * kChunk, MADV_DONTNEED);
      index = last;
    }
  }

  std::mutex lock_;
  const std::uintptr_t begin_, end_;
  std::uintptr_t top_;
  std::uintptr_t touched_;  // no page above was ever used
  std::map<std::uintptr_t, std::uintptr_t> free_;  // address, size
  std::set<std::pair<std::uintptr_t, std::uintptr_t>> by_size_;  // size, address
  std::unordered_map<std::uintptr_t, std::uintptr_t> live_;  // address, size
  std::unordered_map<std::uintptr_t, Held> held_;  // by address
  std::vector<std::uint32_t> used_;  // of each chunk, the last epoch in which a block was there; 0 without pages
  std::vector<bool> huge_;  // of each chunk, whether `collapse` made it a huge page
  std::uint32_t epoch_ = 1;
  bool keep_ = true;
  std::uint64_t live_bytes_ = 0, peak_bytes_ = 0, recent_peak_bytes_ = 0;
};

Arena* arena = nullptr;            // lives as long as the process: tensors outlive everything
c10::Allocator* small = nullptr;  // the allocator that was there before
std::size_t smallest = 0;

void release(void* pointer) {
  if (arena->contains(pointer)) {
    c10::profiledCPUMemoryReporter().Delete(pointer);
    arena->release(pointer);
  } else if (pointer != nullptr) {
    small->raw_deleter()(pointer);
  }
}

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    void* const data = nbytes < smallest ? nullptr : arena->allocate(nbytes);
    if (data == nullptr) {
      c10::DataPtr other = small->allocate(nbytes);
      other.compare_exchange_deleter(small->raw_deleter(), &release);  // `raw_deleter` promises the same for all
      return other;
    }
    c10::profiledCPUMemoryReporter().New(data, nbytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* dest, const void* src, std::size_t count) const override { default_copy_data(dest, src, count); }
};

}  // namespace

extern "C" {

// 0 when it is installed (also when it was before), 1 when another allocator than PyTorch's own is in use, 2 when no
// addresses could be reserved. Not for two threads at once.
int actoffload_install(std::size_t reserve_bytes, std::size_t smallest_bytes) {
  if (arena != nullptr) {
    return 0;
  }
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator() || c10::GetDefaultCPUAllocator()->raw_deleter() == nullptr) {
    return 1;
  }
  void* place = MAP_FAILED;
  std::size_t nbytes = round_up(reserve_bytes, kChunk);
  for (; nbytes >= 128 * kChunk; nbytes = nbytes / 2 / kChunk * kChunk) {
    place = mmap(nullptr, nbytes + kChunk, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place != MAP_FAILED) {
      break;
    }
  }
  if (place == MAP_FAILED) {
    return 2;
  }
  const std::uintptr_t begin = round_up(reinterpret_cast<std::uintptr_t>(place), kChunk);
  small = c10::GetDefaultCPUAllocator();
  smallest = smallest_bytes;
  arena = new Arena(begin, nbytes);
  pthread_atfork([] { arena->lock().lock(); }, [] { arena->lock().unlock(); }, [] { arena->lock().unlock(); });
  auto* const allocator = new CpuAllocator();
  c10::SetCPUAllocator(allocator);
  return c10::GetCPUAllocator() == allocator ? 0 : 1;  // one that was set with a higher priority stays
}

void actoffload_keep(int keep) { arena->keep(keep != 0); }

int actoffload_hold(void* address, int dense) {
  return arena->hold(reinterpret_cast<std::uintptr_t>(address), dense != 0) ? 1 : 0;
}

void actoffload_let_go(void* address) { arena->let_go(reinterpret_cast<std::uintptr_t>(address)); }

void actoffload_next_epoch(std::uint32_t epochs) { arena->next_epoch(epochs); }

// Bytes in blocks, the most there were, bytes with pages, blocks, and the most bytes in blocks since the last call.
void actoffload_facts(std::uint64_t* found) { arena->facts(found); }
}
