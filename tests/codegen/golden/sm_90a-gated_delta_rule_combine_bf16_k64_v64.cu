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

constexpr int COLUMNS = 16;  // of the state, of a workgroup
constexpr int AHEAD = 128 / K;  // steps for which M is on its way, 64 numbers of it to a thread
struct Shared {
  float4 S[2][K / 2][COLUMNS / 2];  // of this step and the next one: two columns of two rows
};
// Pieces change places, so that neither those of neighbouring rows, which a warp writes, nor of every other one, which it
// reads, meet in a bank.
DEV int place(int rows, int columns) { return columns ^ (rows & 6) ^ (rows & 1) << 2; }

// ---- products of floats on the tensor cores, which see the upper 19 bits: of a number and of what these leave of it.
//      What is left out, the product of two rests and their last bits, is some 2^-21 of the whole.
DEV float rest_of(float x) { return x - __uint_as_float(__float_as_uint(x) & 0xFFFFE000); }
DEV float4 rest_of(float4 x) { return make_float4(rest_of(x.x), rest_of(x.y), rest_of(x.z), rest_of(x.w)); }
// d[16][8] += a[16][8] b[8][8].
DEV void mma(float4& d, float4 a, float b0, float b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
               "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
               : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
               : "r"(__float_as_uint(a.x)), "r"(__float_as_uint(a.y)), "r"(__float_as_uint(a.z)), "r"(__float_as_uint(a.w)),
                 "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

extern "C" __global__ void __launch_bounds__(2 * K) gated_delta_rule_combine_bf16_k64_v64(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Shared& shared = *(Shared*)shared_memory;
  const int column = blockIdx.x % (V / COLUMNS) * COLUMNS, block = blockIdx.x / (V / COLUMNS);
  const int value_head = block % args.value_heads, n_sequence = block / args.value_heads;
  const Sequence sequence = sequence_at(args, n_sequence);
  const int segments = (sequence.length + C * args.segment_chunks - 1) / (C * args.segment_chunks);
  const i64 first = first_segment(args, n_sequence);

  // ---- segments with M, one after the other; `last` after them
  float* const carried = (float*)args.ws_carry + (first * args.value_heads + value_head) * CARRIED;
  const i64 pitch = (i64)args.value_heads * CARRIED;
  const int last = segments - 1, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
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

  // ---- what a lane has of a segment, in two blocks of eight rows: two columns of two rows of N and S, fours of a row of M
  float* const lane_N = carried + (16 * warp + 2 * (lane & 3)) * (V + K) + column + 2 * (lane >> 2);
  const float* const lane_M = carried + (16 * warp + (lane >> 2)) * (V + K) + V + 4 * (lane & 3);
  auto load_N = [&](float4 (&N)[2], int n) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* from = lane_N + n * pitch + 8 * i * (V + K);
      const float2 upper = *(const float2*)from, lower = *(const float2*)(from + V + K);
      N[i] = make_float4(upper.x, upper.y, lower.x, lower.y);
    }
  };
  auto put = [&](int buffer, const float4 (&S)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int rows = 8 * warp + 4 * i + (lane & 3);
      shared.S[buffer][rows][place(rows, lane >> 2)] = S[i];
    }
  };

  // ---- the first steps
  int steps[AHEAD];  // their segments
  float4 M[AHEAD][K / 16][2], N[AHEAD][2], S[2];
#pragma unroll
  for (int b = 0; b < AHEAD; b++) {
    steps[b] = next();
    if (steps[b] == last) continue;
    load_N(N[b], steps[b]);
#pragma unroll
    for (int j = 0; j < K / 16; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) M[b][j][i] = *(const float4*)(lane_M + steps[b] * pitch + 8 * i * (V + K) + 16 * j);
  }
  if (steps[0] == last) return;
  load_N(S, steps[0] - 1);
  put(0, S);

  for (int buffer = 0;;) {
#pragma unroll
    for (int b = 0; b < AHEAD; b++, buffer ^= 1) {
      __syncthreads();  // all of S is there, and the one before was read
      const int n = steps[b];
      steps[b] = next();
      const int after = steps[(b + 1) % AHEAD];
      const bool more = steps[b] < last;
      i64 later = steps[b] * pitch;
      asm volatile("" : "+l"(later));

      // ---- S = M S + N; what was used of M makes room for a later step's
      float4 sums[2][3] = {};
#pragma unroll
      for (int j = 0; j < K / 16; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int rows = 8 * j + 2 * (lane & 3) + half;
          const float4 s = shared.S[buffer][rows][place(rows, lane >> 2)], rest = rest_of(s);
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const float4 m = M[b][j][i];
            const float m0 = half ? m.z : m.x, m1 = half ? m.w : m.y;
            mma(sums[i][0], s, m0, m1);
            mma(sums[i][1], rest, m0, m1);
            mma(sums[i][2], s, rest_of(m0), rest_of(m1));
          }
        }
        if (more) {
#pragma unroll
          for (int i = 0; i < 2; i++) M[b][j][i] = *(const float4*)(lane_M + later + 8 * i * (V + K) + 16 * j);
        }
        __syncwarp();  // or the compiler asks for all of them at once, after the last product
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float4 (&x)[3] = sums[i];
        S[i].x = N[b][i].x + x[0].x + (x[1].x + x[2].x), S[i].y = N[b][i].y + x[0].z + (x[1].z + x[2].z);
        S[i].z = N[b][i].z + x[0].y + (x[1].y + x[2].y), S[i].w = N[b][i].w + x[0].w + (x[1].w + x[2].w);
        float* const to = lane_N + n * pitch + 8 * i * (V + K);
        *(float2*)to = make_float2(S[i].x, S[i].y), *(float2*)(to + V + K) = make_float2(S[i].z, S[i].w);
      }
      if (after == last) return;
      if (after > n + 1) load_N(S, after - 1);
      put(buffer ^ 1, S);
      if (more) load_N(N[b], steps[b]);
    }
  }
}
static_assert(sizeof(Shared) == 8192, "what the launch provides");
