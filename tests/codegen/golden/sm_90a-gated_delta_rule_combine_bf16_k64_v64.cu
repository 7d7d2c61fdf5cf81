// gated_delta_rule_combine_bf16_k64_v64 for sm_90a: the states at the ends of segments.
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
// Floats of a segment and value head: row by row N, then M, and whether M is anything but zero. `combine` leaves the state at
// the segment's end where N was; where M is zero, and in a sequence's first segment, N is that state.
constexpr int CARRIED = K * (V + K) + 32, HAS_M = K * (V + K);

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

  // ---- segments with M, one after the other; `last` after them
  float* const carried = (float*)args.ws_carry + (first * args.value_heads + value_head) * CARRIED;
  const i64 pitch = (i64)args.value_heads * CARRIED;
  const int last = segments - 1, lane = threadIdx.x & 31;
  int seen = 1;    // those before it were looked at; the first one needs no M
  u32 with_M = 0;  // of the 32 before `seen`, those that are still to come
  auto next = [&] {
    for (; !with_M && seen < last; seen += 32)
      with_M = __ballot_sync(~0u, seen + lane < last && *(const int*)(carried + (seen + lane) * pitch + HAS_M));
    if (!with_M) return last;
    const int n = seen - 33 + __ffs(with_M);
    with_M &= with_M - 1;
    return n;
  };
  int n = next();
  if (n == last) return;

  // ---- M and N of a segment, asked for before they are needed
  auto row_of = [&](int n) { return carried + n * pitch + row * (V + K) + column; };
  auto load = [&](float4* to, int n) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) to[i] = ((const float4*)row_of(n))[i];
  };
  float4 N[COLUMNS / 4], S[COLUMNS / 4];
  auto fetch = [&](int n, int buffer) {
#pragma unroll 8
    for (int i = threadIdx.x; i < K * K / 4; i += K) {
      const int r = i / (K / 4), piece = i % (K / 4);
      copy(&shared.M[buffer][r][piece ^ (r & 7)], carried + n * pitch + r * (V + K) + V + 4 * piece);
    }
    load(N, n);
  };
  load(S, n - 1);
  fetch(n, 0);

  for (int buffer = 0; n < last; buffer ^= 1) {
    // ---- S to where all threads see it
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) shared.S[row][i] = S[i], S[i] = N[i];
    __syncthreads();
    const int after = next();
    if (after < last) fetch(after, buffer ^ 1);

    // ---- S = M S + N
#pragma unroll 4
    for (int piece = 0; piece < K / 4; piece++) {
      const float4 four = shared.M[buffer][row][piece ^ (row & 7)];
      const float m[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; i++) {
          const float4 s = shared.S[4 * piece + k][i];
          S[i].x += m[k] * s.x, S[i].y += m[k] * s.y, S[i].z += m[k] * s.z, S[i].w += m[k] * s.w;
        }
    }
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) ((float4*)row_of(n))[i] = S[i];
    if (after > n + 1 && after < last) load(S, after - 1);
    n = after;
    __syncthreads();  // all have read S and M
  }
}
static_assert(sizeof(Shared) == 34816, "what the launch provides");
