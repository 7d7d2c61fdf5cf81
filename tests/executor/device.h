// What stands for the device where an emitted HIP source is compiled for a CPU: the same text, its words given
// meanings.
//
// A lane is a thread of its own (machine.h), its registers are that thread's stack. What lanes do together (matrix
// products, barriers, exchanges) is a call of the machine, which waits until all lanes of the wave have come to the
// same place in the text. Loads and stores are not here: the compiler's own instrumentation (-fsanitize=address, its
// checks as calls) reports each to memory.h, which takes the place of its runtime.
//
// Only what emitted sources use is here. Anything else is an undeclared name, so it cannot pass unseen.
#pragma once

#define __global__
#define __device__
#define amdgpu_flat_work_group_size(least, most)  // clang takes these for kernels of a device alone
#define amdgpu_waves_per_eu(least)
// `used`: the machine's calls may change it, which a compiler could otherwise rule out for a variable without a name.
#define __shared__ static __attribute__((used, section("lds"), aligned(16)))

#define EXECUTOR_PURE extern "C" __attribute__((const, nothrow))
#define EXECUTOR_CALL extern "C" __attribute__((convergent, nothrow))

// ---- one lane alone
EXECUTOR_PURE int __builtin_amdgcn_workitem_id_x();
EXECUTOR_PURE int __builtin_amdgcn_workgroup_id_x();
EXECUTOR_PURE float __builtin_amdgcn_exp2f(float x);
EXECUTOR_PURE float __builtin_amdgcn_logf(float x);  // to base 2
EXECUTOR_PURE float __builtin_amdgcn_rsqf(float x);
// Bytes 0 … 3 are those of `low`, 4 … 7 those of `high`; each byte of `select` names one.
inline unsigned __builtin_amdgcn_perm(unsigned high, unsigned low, unsigned select) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= (unsigned)(both >> 8 * (select >> 8 * i & 7) & 255) << 8 * i;
  return result;
}

// ---- a wave, or all of a workgroup
EXECUTOR_CALL void __builtin_amdgcn_fence(int order, const char* scope);
EXECUTOR_CALL void __builtin_amdgcn_s_barrier();
EXECUTOR_CALL int __builtin_amdgcn_readfirstlane(int x);
EXECUTOR_CALL int __builtin_amdgcn_ds_bpermute(int byte, int x);  // of lane byte / 4
EXECUTOR_CALL void __builtin_amdgcn_s_waitcnt(int counts);
#define __builtin_amdgcn_sched_barrier(mask) ((void)0)  // for the order of instructions alone

// Each lane's `size` bytes at `from` go to LDS, one lane's after the other's from `to` on, at some time until the wave
// has waited for them.
EXECUTOR_CALL void executor_load_lds(const void* from, const void* to, unsigned size, int offset);
#define __builtin_amdgcn_global_load_lds(from, to, size, offset, aux) \
  executor_load_lds((const void*)(from), (const void*)(to), size, offset)

// ---- matrix products: numbers of the products are those of layouts.py
EXECUTOR_CALL void executor_matrix(int product, const void* a, const void* b, void* d, int modifiers);

typedef float executor_f4 __attribute__((ext_vector_type(4)));
typedef float executor_f16 __attribute__((ext_vector_type(16)));
typedef short executor_short4 __attribute__((ext_vector_type(4)));
typedef _Float16 executor_half4 __attribute__((ext_vector_type(4)));
typedef _Float16 executor_half8 __attribute__((ext_vector_type(8)));
typedef __bf16 executor_bfloat8 __attribute__((ext_vector_type(8)));

#define EXECUTOR_MATRIX(number, name, operand, accumulator)                                                     \
  inline __attribute__((always_inline)) accumulator __builtin_amdgcn_mfma_##name(operand a, operand b, accumulator d, \
                                                                              int cbsz, int abid, int blgp) {  \
    executor_matrix(number, &a, &b, &d, cbsz | abid | blgp);                                                    \
    return d;                                                                                                   \
  }
EXECUTOR_MATRIX(0, f32_16x16x16bf16_1k, executor_short4, executor_f4)
EXECUTOR_MATRIX(1, f32_16x16x16f16, executor_half4, executor_f4)
EXECUTOR_MATRIX(2, f32_32x32x8bf16_1k, executor_short4, executor_f16)
EXECUTOR_MATRIX(3, f32_32x32x8f16, executor_half4, executor_f16)
EXECUTOR_MATRIX(4, f32_16x16x4f32, float, executor_f4)
#ifdef __gfx950__
EXECUTOR_MATRIX(5, f32_16x16x32_bf16, executor_bfloat8, executor_f4)
EXECUTOR_MATRIX(6, f32_16x16x32_f16, executor_half8, executor_f4)
EXECUTOR_MATRIX(7, f32_32x32x16_bf16, executor_bfloat8, executor_f16)
EXECUTOR_MATRIX(8, f32_32x32x16_f16, executor_half8, executor_f16)

// ---- transposing reads of LDS
typedef short executor_read4 __attribute__((vector_size(8)));
EXECUTOR_CALL void executor_read_transposed(const void* from, void* to);
inline __attribute__((always_inline)) executor_read4
__builtin_amdgcn_ds_read_tr16_b64_v4i16(__attribute__((address_space(3))) executor_read4* from) {
  executor_read4 x;
  executor_read_transposed((const void*)from, &x);
  return x;
}
#endif
