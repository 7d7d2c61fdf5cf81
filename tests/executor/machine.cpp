// A CDNA device that runs emitted kernels lane by lane: waves of 64, barriers, LDS, matrix products, exchanges.
#include "machine.h"
#include "memory.h"
#include "operations.h"

// ---- lanes come and go
static void next_lane(Lane* me) {
  // Lanes before this one of its wave have stopped; the next that has not returned goes on.
  const int last = (me->thread / LANES + 1) * LANES;
  void* to = main_stack;
  current = nullptr;
  for (int i = me->thread + 1; i < last; i++)
    if (lanes[i].kind != RETURNED) {
      current = lanes + i;
      to = current->stack_pointer;
      break;
    }
  executor_switch(&me->stack_pointer, to);
}
static void start_lane() {
  Lane* me = current;
  launch->entry(launch->arguments);
  me->kind = RETURNED;
  next_lane(me);
}
static Lane* stop(Kind kind, const void* site) {
  Lane* me = current;
  me->kind = kind;
  me->site = site;
  next_lane(me);
  return me;
}
#define STOP(kind) stop(kind, __builtin_return_address(0))

// ---- what emitted text calls
extern "C" int __builtin_amdgcn_workitem_id_x() { return current->thread; }
extern "C" int __builtin_amdgcn_workgroup_id_x() { return block; }
extern "C" void __builtin_amdgcn_fence(int order, const char*) {
  if (order == __ATOMIC_RELEASE || order >= __ATOMIC_ACQ_REL) current->released = true;
  if (order == __ATOMIC_ACQUIRE || order >= __ATOMIC_ACQ_REL) current->acquired = true;
}
extern "C" void __builtin_amdgcn_s_barrier() {
  if (!current->released) fail_here("a barrier without a release fence after the last access");
  current->acquired = false;
  STOP(BARRIER);
}
extern "C" int __builtin_amdgcn_readfirstlane(int x) {
  current->number = x;
  return STOP(FIRST_LANE)->number;
}
extern "C" int __builtin_amdgcn_ds_bpermute(int byte, int x) {
  current->number = x;
  current->other = byte;
  return STOP(PERMUTE)->number;
}
extern "C" void executor_matrix(int product, const void* a, const void* b, void* d, int modifiers) {
  if (modifiers) fail_here("matrix products with modifiers are not known here");
  current->number = product;
  current->a = a;
  current->b = b;
  current->d = d;
  STOP(MATRIX);
}
extern "C" void executor_read_transposed(const void* from, void* to) {
  current->a = from;
  current->d = to;
  STOP(READ_TRANSPOSED);
}
extern "C" void executor_load_lds(const void* from, const void* to, unsigned size, int offset) {
  current->a = (const char*)from + offset;
  current->b = (const char*)to + offset;
  current->number = size;
  STOP(LOAD_LDS);
}
extern "C" void __builtin_amdgcn_s_waitcnt(int counts) {
  current->number = (counts & 15) | (counts >> 14 & 3) << 4;  // those of loads from memory
  STOP(WAIT);
}

// ---- waves
static void start_wave(int w) {
  waves[w] = {.at_barrier = false, .done = false, .under_way = 0};
  for (int i = w * LANES; i < (w + 1) * LANES; i++) {
    Lane& lane = lanes[i];
    lane = {.stack = stacks[i], .acquired = true, .thread = (u16)i};
    u64* top = (u64*)(stacks[i] + STACK) - 1;
    *--top = (u64)start_lane;  // where the switch returns to, its stack as after a call
    for (int saved = 0; saved < 6; saved++) *--top = 0;
    lane.stack_pointer = top;
  }
}
// Runs the lanes of a wave until all have stopped, and does what they stopped for.
static void run_wave(int w) {
  Wave& wave = waves[w];
  Lane* lane = lanes + w * LANES;
  current = lane;
  while (current->kind == RETURNED) current++;
  executor_switch(&main_stack, current->stack_pointer);
  if (failed) return;
  for (int i = 1; i < LANES; i++)
    if (lane[i].kind != lane->kind || (lane->kind != RETURNED && lane[i].site != lane->site)) {
      const bool barrier = lane->kind == BARRIER || lane[i].kind == BARRIER;
      return fail(lane + i, "%s: it is %s, and lane 0 of its wave %s%s",
                  barrier ? "divergent barrier" : "divergent wave", KINDS[lane[i].kind], KINDS[lane->kind],
                  lane->kind == lane[i].kind ? " elsewhere" : "");
    }
  switch (lane->kind) {
    case BARRIER: wave.at_barrier = true; break;
    case RETURNED:
      wave.done = true;
      if (wave.under_way) fail(lane, "asynchronous loads that nothing waited for");
      break;
    case FIRST_LANE:
      for (int i = 1; i < LANES; i++) lane[i].number = lane->number;
      break;
    case PERMUTE: permute(lane); break;
    case MATRIX: multiply(lane); break;
    case READ_TRANSPOSED: read_transposed(lane); break;
    case LOAD_LDS: load_lds(wave, lane); break;
    case WAIT: wait_for(wave, lane, lane->number); break;
    case NONE: break;
  }
}
static void pass_barrier(int count) {
  for (int w = 0; w < count; w++) {
    const Lane& lane = lanes[w * LANES];
    if (waves[w].done) return fail(&lane, "divergent barrier: this wave has returned, and others wait");
    if (lane.site != lanes->site) return fail(&lane, "divergent barrier: wave 0 waits at another one");
  }
  for (int w = 0; w < count; w++) waves[w].at_barrier = false;
  launch->phase++;
  launch->barriers++;
}
static void run_block(int count) {
  memset(launch->lds, 0xFF, launch->lds_size);  // NaN, where a check should ever miss a read
  memset(under_way, 0, launch->lds_size / 2);
  block_phase = ++launch->phase;
  for (int w = 0; w < count; w++) start_wave(w);
  while (!failed) {
    int ready[MOST_WAVES], n = 0, waiting = 0;
    for (int w = 0; w < count; w++) {
      if (waves[w].at_barrier) waiting++;
      else if (!waves[w].done) ready[n++] = w;
    }
    if (n) run_wave(ready[draw() % n]);
    else if (waiting) pass_barrier(count);
    else return;
  }
}

extern "C" int execute(Launch* what) {
  launch = what;
  failed = false;
  last_region = nullptr;
  random_state = what->seed;
  what->first_phase = what->phase + 1;
  for (u32 i = 0; i < what->blocks && !failed; i++) {
    block = what->order[i];
    run_block(what->threads / LANES);
  }
  launch = nullptr;
  return failed;
}
