// delta_rule_prepare_fp32_k64_v64 for host: per chunk: Gram products, triangular inverse.
// Rendered by qla-codegen. Build:
//   python -m ziglang c++ -std=c++20 -O3 -fno-math-errno -ffp-contract=fast -fassociative-math -fno-signed-zeros -fno-trapping-math -ffreestanding -nostdlib -fno-exceptions -fno-rtti -fPIC -shared -o delta_rule_prepare_fp32_k64_v64.so delta_rule_prepare_fp32_k64_v64.cpp

#define DEV static inline __attribute__((always_inline))
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef float number;  // fp32

DEV float from_bf16(u16 x) { return __builtin_bit_cast(float, (u32)x << 16); }
DEV float from_fp16(u16 x) { return (float)__builtin_bit_cast(_Float16, x); }
DEV float to_number(float x) { return x; }
DEV float to_float(float x) { return x; }

// ---- arguments: one block; strides in elements
struct Args {
  void* q;
  void* k;
  void* cu_seqlens;
  void* ws_a;
  void* ws_p;
  void* ws_rows;
  void* beta;
  i64 q_stride_b;
  i64 q_stride_t;
  i64 q_stride_h;
  i64 q_stride_d;
  i64 k_stride_b;
  i64 k_stride_t;
  i64 k_stride_h;
  i64 k_stride_d;
  i64 beta_stride_b;
  i64 beta_stride_t;
  i64 beta_stride_h;
  int tokens;
  int sequences;
  int heads;
  int value_heads;
  int has_cu_seqlens;
  int cu_is_int64;
  int flags;
  int beta_type;
  float scale;
};

constexpr int C = 64;  // tokens of a chunk
constexpr int K = 64;  // head dim of q and k

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
// The rows of a head, from a token on.
template <class T>
DEV T* rows_of(T* x, int batch, i64 token, int head, i64 stride_b, i64 stride_t, i64 stride_h) {
  return x + batch * stride_b + token * stride_t + head * stride_h;
}

struct alignas(8) TwoFloats { float x[2]; };

// What a workgroup does at a time: a chunk, which has `rows` rows from `token` on, and value heads `base` … base + count - 1,
// which share `head` of q and k.
struct Item { int slot, batch, token, rows, head, base, count; };

// ---- functions without a library, relative error about 1e-7
DEV float exp_(float x) {
  x = x < -87.f ? -87.f : x > 88.f ? 88.f : x;
  const float n = __builtin_floorf(x * 1.44269504f + 0.5f);
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
  const float p = 1.f + r * (1.f + r * (0.5f + r * (1.66666667e-1f + r * (4.16666667e-2f + r * (8.33333333e-3f + r * 1.38888889e-3f)))));
  return p * __builtin_bit_cast(float, ((int)n + 127) << 23);
}
DEV float rsqrt_(float x) { return 1.f / __builtin_sqrtf(x); }

// ---- products: four rows by 64 columns at a time stay in registers
typedef float Vec __attribute__((vector_size(64), aligned(4)));
// d[ROWS][COLUMNS] (+)= sum over i < count(row) of t[row * row_stride + i * inner_stride] * x[i][COLUMNS]
template <bool SET, int ROWS, int COLUMNS, class F>
static void multiply(float* d, const float* t, int row_stride, int inner_stride, const float* x, F count) {
  constexpr int WIDTH = COLUMNS < 64 ? COLUMNS / 16 : 4;
  for (int column = 0; column < COLUMNS; column += 16 * WIDTH)
    for (int row = 0; row < ROWS; row += 4) {
      Vec sum[4][WIDTH];
      for (int r = 0; r < 4; r++)
        for (int c = 0; c < WIDTH; c++) sum[r][c] = SET ? Vec{} : *(const Vec*)(d + (row + r) * COLUMNS + column + 16 * c);
      for (int i = 0; i < count(row + 3); i++)
        for (int r = 0; r < 4; r++)
          for (int c = 0; c < WIDTH; c++)
            sum[r][c] += t[(row + r) * row_stride + i * inner_stride] * *(const Vec*)(x + i * COLUMNS + column + 16 * c);
      for (int r = 0; r < 4; r++)
        for (int c = 0; c < WIDTH; c++) *(Vec*)(d + (row + r) * COLUMNS + column + 16 * c) = sum[r][c];
    }
}

// ---- one thread is the workgroup
#define FOR_EACH(i, n) for (int i = 0; i < (n); i++)
DEV void sync() {}
DEV void sync_tiles() {}
constexpr int TEAMS = 1;  // the workgroup
#define FOR_TEAM(i, n) FOR_EACH(i, n)
DEV int team() { return 0; }
constexpr int LDL = C, LOWER = C * LDL;  // floats of a row and of all of a lower triangular matrix
DEV int lower_at(int r, int c) { return r * LDL + c; }
struct alignas(16) EightFloats { float x[8]; };
template <class T> DEV void put_lower(T& shared, int head, int r, int c, const float* l) {
  *(TwoFloats*)(shared.L[head] + lower_at(r, c)) = TwoFloats{l[0], l[1]};
}

// ---- tiles
template <int ROWS, int COLUMNS>
struct SharedTile {
  float x[ROWS * COLUMNS];
};
// Rows of a tensor into a tile; rows at and after `rows` become zero.
template <int COLUMNS>
DEV void load_tile(SharedTile<C, COLUMNS>& to, const number* from, i64 stride_t, i64 stride_d, int rows) {
  for (int row = 0; row < C; row++)
    for (int d = 0; d < COLUMNS; d++) to.x[row * COLUMNS + d] = row < rows ? to_float(from[row * stride_t + d * stride_d]) : 0.f;
}
// The sum of the squares of a tile's row.
template <int COLUMNS> DEV float row_square(SharedTile<C, COLUMNS>& t, int row) {
  float sum = 0.f;
  for (int d = 0; d < COLUMNS; d++) sum += t.x[row * COLUMNS + d] * t.x[row * COLUMNS + d];
  return sum;
}

// ---- tiles in memory lie row by row: piece i of one holds eight neighbours from (row, column) on
struct Place { int row, column; };
template <int ROWS, int COLUMNS> DEV Place image_place(int i) { return {i / (COLUMNS / 8), i % (COLUMNS / 8) * 8}; }
template <int ROWS, int COLUMNS> DEV int image_pair(int row, int column) { return (row * COLUMNS + column) / 2; }
template <int ROWS> DEV int row_place(int r) { return r; }
DEV void store_eight(void* to, i64 i, const float* x) {
  for (int e = 0; e < 8; e++) ((number*)to)[8 * i + e] = to_number(x[e]);
}
DEV void store_pair(void* to, i64 i, float lo, float hi) {
  ((number*)to)[2 * i] = to_number(lo);
  ((number*)to)[2 * i + 1] = to_number(hi);
}

// ---- Gram products: [C, C] = a bᵀ
struct Products { float qk[C * C], kk[C * C]; };
static void square(float* x, SharedTile<C, K>& a, SharedTile<C, K>& b) {
  float transposed[K * C];
  for (int d = 0; d < K; d++)
    for (int r = 0; r < C; r++) transposed[d * C + r] = b.x[r * K + d];
  multiply<true, C, C>(x, a.x, K, 1, transposed, [](int) { return K; });
}
// 1 / ‖x‖ of the rows of two tiles, 1 unless `wanted`.
DEV void norms(SharedTile<C, K>& q, SharedTile<C, K>& k, bool wanted, float* q_norm, float* k_norm) {
  FOR_EACH(i, 2 * C) {
    const int r = i % C;
    (i < C ? q_norm : k_norm)[r] = wanted ? rsqrt_(1e-6f + row_square(i < C ? q : k, r)) : 1.f;
  }
}
static Products gram(SharedTile<C, K>& q, SharedTile<C, K>& k, bool wanted, float* q_norm, float* k_norm) {
  Products p;
  norms(q, k, wanted, q_norm, k_norm);
  square(p.qk, q, k);
  square(p.kk, k, k);
  return p;
}
// Calls f(r, c, row(r), {column(c), column(c + 1)}, q k, k k) for pairs of neighbours of the products.
template <class R, class S, class F> DEV void for_pairs(Products& p, R row, S column, F f) {
  for (int r = 0; r < C; r++)
    for (int c = 0; c < C; c += 2) {
      const decltype(column(0)) columns[2] = {column(c), column(c + 1)};
      f(r, c, row(r), columns, p.qk + r * C + c, p.kk + r * C + c);
    }
}

// x (strictly lower) becomes (I + x)⁻¹, row by row.
static void solve_unit_lower(float* x) {
  for (int r = 0; r < C; r++) {
    float row[C];
    for (int c = 0; c < C; c++) row[c] = c == r ? 1.f : 0.f;
    for (int m = 0; m < r; m++)
      for (int c = 0; c <= m; c++) row[c] -= x[lower_at(r, m)] * x[lower_at(m, c)];
    for (int c = 0; c < C; c++) x[lower_at(r, c)] = row[c];
  }
}

// A of a head.
template <class T>
DEV void store_inverses(T& shared, int, void* to, i64 place) {
  solve_unit_lower(shared.L[0]);
  FOR_EACH(i, C * C / 8) {
    const Place p = image_place<C, C>(i);
    const EightFloats x = *(const EightFloats*)(shared.L[0] + lower_at(p.row, p.column));
    const EightFloats beta = *(const EightFloats*)(shared.beta[0] + p.column);
    float a[8];
    for (int e = 0; e < 8; e++) a[e] = p.column + e <= p.row ? x.x[e] * beta.x[e] : 0.f;
    store_eight(to, place * C * C / 8 + i, a);
  }
}

// P of a chunk, by its pairs f.
template <class T, class R, class S, class F>
DEV void store_matrix(T& shared, int head, void* to, i64 place, Products& products, R row, S column, F f) {
  for_pairs(products, row, column, [&](int r, int c, auto of_row, const auto* columns, float* qk, float* kk) {
    const auto x = f(r, c, of_row, columns, qk, kk);
    put_lower(shared, head, r, c, x.l);
    store_pair(to, place * C * C / 2 + image_pair<C, C>(r, c), x.p[0], x.p[1]);
  });
}

// ---- numbers whose type the caller chose: 0 float, 1 bf16, 2 fp16
DEV float load_number(const void* p, i64 at, int type) {
  return type == 0 ? ((const float*)p)[at] : type == 1 ? from_bf16(((const u16*)p)[at]) : from_fp16(((const u16*)p)[at]);
}
constexpr int L2NORM = 1, BETA_SIGMOID = 2, BETA_DOUBLE = 4;  // flags
DEV float beta_of(const Args& args, float x) {
  if (args.flags & BETA_SIGMOID) x = 1.f / (1.f + exp_(-x));
  return args.flags & BETA_DOUBLE ? 2.f * x : x;
}

// ---- the record of a (chunk, value head): bytes of its vectors
constexpr int RECORD = 768, MINUS_IN = 0, LEFT = 256, OUT = 512;
DEV void put_row(void* rows, i64 place, int vector, int at, float x) {
  *(float*)((char*)rows + place * RECORD + vector + 4 * at) = x;
}
DEV void put_half_row(void* rows, i64 place, int vector, int at, float x) {
  *(number*)((char*)rows + place * RECORD + vector + sizeof(number) * at) = to_number(x);
}
DEV i64 beta_at(const Args& args, const Item& item, int head, int r) {
  return item.batch * args.beta_stride_b + (i64)(item.token + r) * args.beta_stride_t + (item.base + head) * args.beta_stride_h;
}

// ---- what the threads of a workgroup share
struct Shared {
  union {
    struct { SharedTile<C, K> q, k; };  // tokens of the chunk, zero after the sequence's end
    alignas(16) float L[TEAMS][LOWER];  // once their products are known
  };
  alignas(16) float beta[TEAMS][C];
  float q_norm[C], k_norm[C];
};

// What P and L take from a row and a column.
struct Row { float G, beta; };
struct Column { float G; };
struct Pairs { float p[2], l[2]; };  // of neighbours

// Slot of a chunk -> its sequence: the last one whose first slot is not after it.
DEV Sequence sequence_of_slot(const Args& args, int slot) {
  if (!args.has_cu_seqlens) return sequence_at(args, (unsigned)slot / ((unsigned)(args.tokens + C - 1) / C));
  int low = 0, high = args.sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (boundary(args, middle) / C + middle <= slot) low = middle;
    else high = middle - 1;
  }
  return sequence_at(args, low);
}

// The n-th of the items: of a group's value heads, `most` are done at once, and all in so many passes.
DEV Item item_at(const Args& args, unsigned n, unsigned group, unsigned most, unsigned passes) {
  const unsigned heads = args.heads * passes, at = n % heads, head = at / passes, done = at % passes * most;
  const int slot = n / heads;
  const Sequence sequence = sequence_of_slot(args, slot);
  const int first = (slot - sequence.slot) * C;
  return {slot, sequence.batch, sequence.start + first, sequence.length - first < C ? sequence.length - first : C,
          (int)head, (int)(head * group + done), (int)(group - done < most ? group - done : most)};
}

static void workgroup(const Args& args, int block) {
  auto block_id = [&] { return block; };
  Shared shared;

  // ---- the chunk and the heads of its group
  const unsigned group = (unsigned)args.value_heads / (unsigned)args.heads;
  const Item item = item_at(args, block_id(), group, TEAMS, (group + TEAMS - 1) / TEAMS);
  if (item.rows <= 0) return;
  float (*const beta)[C] = shared.beta;
  const number* q = rows_of((const number*)args.q, item.batch, item.token, item.head, args.q_stride_b, args.q_stride_t, args.q_stride_h);
  const number* k = rows_of((const number*)args.k, item.batch, item.token, item.head, args.k_stride_b, args.k_stride_t, args.k_stride_h);

  // ---- the tiles; meanwhile, betas
  load_tile(shared.q, q, args.q_stride_t, args.q_stride_d, item.rows);
  load_tile(shared.k, k, args.k_stride_t, args.k_stride_d, item.rows);
  if (team() < item.count) {
    FOR_TEAM(r, C) {
      beta[team()][r] = r < item.rows ? beta_of(args, load_number(args.beta, beta_at(args, item, team(), r), args.beta_type)) : 0.f;
    }
  }
  sync_tiles();

  // ---- Q Kᵀ and K Kᵀ, once for these heads, and 1 / ‖q‖ and 1 / ‖k‖, which are folded into them
  Products products = gram(shared.q, shared.k, args.flags & L2NORM, shared.q_norm, shared.k_norm);
  sync();

  for_pairs(
      products,
      [&](int r) { return TwoFloats{args.scale * shared.q_norm[r], shared.k_norm[r]}; },
      [&](int c) { return shared.k_norm[c]; },
      [&](int, int, TwoFloats row, const float* column, float* qk, float* kk) {
        for (int e = 0; e < 2; e++) {
          qk[e] *= row.x[0] * column[e];
          kk[e] *= row.x[1] * column[e];
        }
      });

  // ---- the factors of the chain's rows
  const int of = team();
  if (of < item.count) {
    const i64 place = (i64)item.slot * args.value_heads + item.base + of;
    FOR_TEAM(r, C) {
      const float in = 1.f;
      put_half_row(args.ws_rows, place, MINUS_IN, row_place<C>(r), -in * shared.k_norm[r]);
      put_half_row(args.ws_rows, place, LEFT, row_place<C>(r), shared.k_norm[r]);
      put_row(args.ws_rows, place, OUT, row_place<C>(r), args.scale * in * shared.q_norm[r]);
    }
  }

  // ---- P and L of these heads
  const i64 first_place = (i64)item.slot * args.value_heads + item.base;
  for (int t = 0; t < item.count; t++) {
    store_matrix(
        shared, t, args.ws_p, first_place + t, products,
        [&](int r) { return Row{0.f, beta[t][r]}; },
        [&](int c) { return Column{0.f}; },
        [&](int r, int c, Row row, const Column* column, const float* qk, const float* kk) {
          float p[2], l[2];
          for (int e = 0; e < 2; e++) {
            const float q_factor = 1.f, k_factor = row.beta;
            p[e] = c + e <= r ? q_factor * qk[e] : 0.f;
            l[e] = c + e < r ? k_factor * kk[e] : 0.f;
          }
          return Pairs{ {p[0], p[1]}, {l[0], l[1]}};
        });
  }
  sync();

  // ---- A = (I + L)⁻¹ diag(b)
  store_inverses(shared, item.count, args.ws_a, first_place);
}

extern "C" __attribute__((visibility("default"))) void delta_rule_prepare_fp32_k64_v64(const Args* args, int begin, int end) {
  for (int block = begin; block < end; block++) workgroup(*args, block);
}
