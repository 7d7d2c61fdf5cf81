// gated_delta_rule_combine_bf16_k64_v64 for sm_90a: the states at the starts of segments.
// Rendered by qla-codegen. Build:
//   nvcc -cubin -gencode=arch=compute_90a,code=sm_90a -std=c++17 -ftz=true -o gated_delta_rule_combine_bf16_k64_v64.cubin gated_delta_rule_combine_bf16_k64_v64.cu

#define DEV __device__ __forceinline__
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef u16 number;  // bf16

// ---- arguments: one block; strides in elements
struct Args {
  void* cu_seqlens;
  void* ws_carry;
  void* ws_starts;
  int tokens;
  int value_heads;
  int has_cu_seqlens;
  int cu_is_int64;
  int sequences;
  int segment_chunks;
};

constexpr int C = 64;  // tokens of a chunk
constexpr int K = 64, V = 64;  // head dims

// A sequence: rows [start, start + length) of batch row `batch`; its chunks use workspace slots from `slot` on.
struct Sequence {
  int batch, start, length, slot;
};
DEV i64 boundary(const Args& args, int n) {
  return args.cu_is_int64 ? ((const i64*)args.cu_seqlens)[n] : ((const int*)args.cu_seqlens)[n];
}
DEV int clamp(i64 x, int low, int high) { return x < low ? low : x > high ? high : (int)x; }
DEV Sequence sequence_at(const Args& args, int n) {
  if (!args.has_cu_seqlens) return {n, 0, args.tokens, n * ((args.tokens + C - 1) / C)};
  const int start = clamp(boundary(args, n), 0, args.tokens), end = clamp(boundary(args, n + 1), start, args.tokens);
  return {0, start, end - start, start / C + n};
}
// The number of a sequence's first segment.
DEV int first_segment(const Args& args, int n) {
  const int tokens = C * args.segment_chunks;
  return args.has_cu_seqlens ? clamp(boundary(args, n), 0, args.tokens) / tokens + n : n * ((args.tokens + tokens - 1) / tokens);
}
// N, then M, row by row, and whether M is anything but zero: floats of a segment and value head.
constexpr int CARRIED = K * (V + K) + 4, HAS_M = K * (V + K);

constexpr int COLUMNS = 8;  // of the state, of a workgroup
struct Shared {
  float4 M[2][K][K / 4];  // this step's and the next one's; pieces of a row are exchanged by row, against bank conflicts
  float4 S[K][COLUMNS / 4];
};
// On its way to shared memory, waited for with all others.
DEV void copy(float4* to, const float* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

extern "C" __global__ void __launch_bounds__(K, 1) gated_delta_rule_combine_bf16_k64_v64(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Shared& shared = *(Shared*)shared_memory;
  const int column = blockIdx.x % (V / COLUMNS) * COLUMNS, block = blockIdx.x / (V / COLUMNS);
  const int value_head = block % args.value_heads, n_sequence = block / args.value_heads, row = threadIdx.x;
  const Sequence sequence = sequence_at(args, n_sequence);
  const int segments = (sequence.length + C * args.segment_chunks - 1) / (C * args.segment_chunks);
  const i64 first = first_segment(args, n_sequence);

  // ---- M and N of segment n, asked for before they are needed; M only where it is not zero
  float4 N[COLUMNS / 4];
  auto carry_of = [&](int n) { return (const float*)args.ws_carry + ((first + n) * args.value_heads + value_head) * CARRIED; };
  auto has_M = [&](int n) { return n > 0 && n + 1 < segments && *(const int*)(carry_of(n) + HAS_M); };
  bool multiply = false, next = has_M(1);  // of this step and of the next one
  auto fetch = [&](int n, bool wanted) {
    const float* carry = carry_of(n);
#pragma unroll 8
    for (int i = threadIdx.x; wanted && i < K * K / 4; i += K) {
      const int r = i / (K / 4), piece = i % (K / 4);
      copy(&shared.M[n & 1][r][piece ^ (r & 7)], carry + r * (V + K) + V + 4 * piece);
    }
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) N[i] = *(const float4*)(carry + row * (V + K) + column + 4 * i);
  };
  if (segments > 1) fetch(0, false);

  float state[COLUMNS] = {};
  for (int n = 0; n + 1 < segments; n++) {
    // ---- S to where all threads see it
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) {
      shared.S[row][i] = make_float4(state[4 * i], state[4 * i + 1], state[4 * i + 2], state[4 * i + 3]);
      state[4 * i] = N[i].x, state[4 * i + 1] = N[i].y, state[4 * i + 2] = N[i].z, state[4 * i + 3] = N[i].w;
    }
    __syncthreads();
    if (n + 2 < segments) fetch(n + 1, next);
    const bool after_next = has_M(n + 2);

    // ---- S = M S + N
#pragma unroll 4
    for (int piece = 0; multiply && piece < K / 4; piece++) {
      const float4 four = shared.M[n & 1][row][piece ^ (row & 7)];
      const float m[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; i++) {
          const float4 s = shared.S[4 * piece + k][i];
          state[4 * i] += m[k] * s.x, state[4 * i + 1] += m[k] * s.y, state[4 * i + 2] += m[k] * s.z, state[4 * i + 3] += m[k] * s.w;
        }
    }
    float* to = (float*)args.ws_starts + ((first + n + 1) * args.value_heads + value_head) * K * V + row * V + column;
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++)
      *(float4*)(to + 4 * i) = make_float4(state[4 * i], state[4 * i + 1], state[4 * i + 2], state[4 * i + 3]);
    multiply = next, next = after_next;
    __syncthreads();  // all have read S and M
  }
}
static_assert(sizeof(Shared) == 34816, "what the launch provides");
