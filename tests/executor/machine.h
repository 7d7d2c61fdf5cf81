// The machine's lanes and what is known of them. A lane is a fiber: a stack, and the place where it stopped. The lanes
// of a wave run one after another, each until it comes to something that the wave does together; which wave goes on is
// drawn at random each time.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef __SIZE_TYPE__ size_t;

// From the libc of the process that loads the machine.
extern "C" int snprintf(char*, size_t, const char*, ...) __attribute__((format(printf, 3, 4)));
extern "C" void* memcpy(void*, const void*, size_t);
extern "C" void* memmove(void*, const void*, size_t);
extern "C" void* memset(void*, int, size_t);

constexpr int LANES = 64, MOST_THREADS = 1024, MOST_WAVES = MOST_THREADS / LANES;
constexpr size_t STACK = 128 << 10;  // bytes of a lane; pages that it does not reach cost nothing

// ---- what the driver hands over; machine.py has the same structs
struct Granule {  // two bytes of memory: in which phase, and by which thread, they were last touched
  u32 written, read;
  u16 writer, reader;
};
struct Region {
  char* base;
  u64 size;
  const char* name;
  Granule* granules;  // none: written before the launch and only read by it
};
struct Launch {
  void (*entry)(const void* arguments);
  const void* arguments;
  const u32* order;  // of the workgroups
  u32 blocks, threads;
  char* lds;
  u64 lds_size;
  Granule* lds_granules;
  Region* regions;
  u64 region_count, seed;
  u32 load_sizes;                // bit n: global_load_lds can take n bytes
  u32 first_phase, phase;  // of this launch, and the last one so far; a phase ends at a barrier
  u64 accesses, products, barriers;
  char message[1024];  // why it failed
};
// Of a product: where the numbers of each lane belong. `a_place` and `b_place` say where they go in matrices of which a
// lane then reads what it needs: of A, for each k, the rows of its accumulator (all lanes of a `group` have the same);
// of B, its column.
struct Layout {
  u32 numbers, accumulators, k;  // of a lane's operand, of its accumulator, of the product
  u32 type;                      // of the operands: 0 float, 1 bf16, 2 fp16
  const u16 *a_place, *b_place;  // [64][numbers]
  const u16 *group, *column;     // [64]
};

// ---- lanes
enum Kind { NONE, BARRIER, FIRST_LANE, PERMUTE, MATRIX, READ_TRANSPOSED, LOAD_LDS, WAIT, RETURNED };
const char* const KINDS[] = {"running",
                             "at a barrier",
                             "at readfirstlane",
                             "at ds_bpermute",
                             "at a matrix product",
                             "at a ds_read_tr",
                             "at global_load_lds",
                             "at s_waitcnt",
                             "returned"};

struct Lane {
  void* stack_pointer;
  char* stack;
  Kind kind;
  const void* site;  // return address of the call at which it stopped
  bool released, acquired;  // whether a fence has followed its last access, and preceded its next
  u16 thread;
  int number, other;  // small arguments and results of that call
  const void *a, *b;
  void* d;
};

constexpr int MOST_LOADS = 64;  // of a wave under way: what its counter can tell apart
struct Wave {
  bool at_barrier, done;
  int under_way;
  struct Load {
    char* to[LANES];
    char data[LANES][16];
    u32 size;
  } loads[MOST_LOADS];
};

static Lane lanes[MOST_THREADS];
static Wave waves[MOST_WAVES];
static Lane* current;
static Launch* launch;
static u32 block, block_phase;  // the workgroup, and its first phase
static void* main_stack;
static bool failed;
static u64 random_state;
static char stacks[MOST_THREADS][STACK] __attribute__((aligned(4096)));

static u64 draw() {  // splitmix64
  u64 x = random_state += 0x9E3779B97F4A7C15;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

// Saves what a call must keep and goes on where another stack left off.
extern "C" void executor_switch(void** from, void* to);
asm(R"(
.text
.globl executor_switch
.type executor_switch, @function
executor_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  retq
.size executor_switch, .-executor_switch
)");

// The first failure is the one told. A lane that failed never goes on; the launch ends.
template <class... T>
static void fail(const Lane* lane, const char* format, T... values) {
  if (failed) return;
  failed = true;
  const int n = snprintf(launch->message, sizeof launch->message, format, values...);
  snprintf(launch->message + n, sizeof launch->message - n,
           "; workgroup %u, wave %d, lane %d, %u barriers after its start", block, lane->thread / LANES,
           lane->thread % LANES, launch->phase - block_phase);
}
[[noreturn]] static void abandon() {
  Lane* me = current;
  current = nullptr;
  executor_switch(&me->stack_pointer, main_stack);
  __builtin_unreachable();
}
template <class... T>
[[noreturn]] static void fail_here(const char* format, T... values) {
  fail(current, format, values...);
  abandon();
}
