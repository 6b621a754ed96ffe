// How the blocks of a kernel, one for each chunk of each head, hand a state on from chunk to chunk, in reverse.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "splits.h"

#ifdef __CUDACC__
#include "ptx.cuh"
#endif

namespace rwkv_jax::cuda {

// Where a state [rows, columns] is that goes from chunk to chunk, and the same in bfloat16, filled up with zeros. The
// chunks of its relay that are done have handed it on.
struct Baton {
  float* data;
  int rows, columns;
  uint4* rounded;
  uint32_t* done;
};

// The chunk of a block, or none if `row` is negative.
struct RelayPlace {
  int row, head, chunk;  // the sequence or row; the chunk in it
  Span span;             // of the sequence
  int split;
  int position;  // how many chunks of the split come after this one

  RWKV_JAX_ANYWHERE int Chunks() const {
    return (static_cast<int>(span.tokens) + int{kChunk} - 1) / int{kChunk};
  }
};

// The chunks of a split of a head are a relay. Each block comes after the block that it waits for, so that one runs or
// has ended: GPUs start the blocks of a launch in their order, on which NVIDIA's CUB relies too.
//
// A state is [rows, columns] at the ends of a sequence, and [size, size] between splits.
struct Relays {
  Splits splits;
  Sequences sequences;
  int64_t batch, tokens, heads;
  int rows, columns, size;
  const float* start;  // the states of all heads behind the last tokens, ...
  float* end;          // ... and those before the first ones, once the relays are done
  uint4* rounded;      // [relays, size, size] of bfloat16: the states that are handed on
  uint32_t* done;      // [relays]: how many chunks are done
  int32_t*
      order;  // of sequences of different lengths, [chunks]: the chunks in their order, and then -1
  int64_t chunks;  // of all rows
  bool
      at_once;  // whether a block hands a state on as early as it can, or does its other work first

  int64_t Count() const {
    const Grid blocks = splits.Blocks(batch, heads);
    return blocks.x * blocks.y;
  }
  // The blocks of the kernel.
  int64_t Blocks() const {
    return sequences.Given() ? chunks * heads : Count() * ChunksPerSplit(Chunks(tokens));
  }
  RWKV_JAX_ANYWHERE int ChunksPerSplit(int of_sequence) const {
    const int count = static_cast<int>(splits.count), each = static_cast<int>(splits.chunks);
    return each == 0 ? (of_sequence + count - 1) / count : each;
  }

#ifdef __CUDACC__
  __device__ RelayPlace PlaceOfBlock() const {
    const unsigned block = blockIdx.x, turn = block / static_cast<unsigned>(heads);
    RelayPlace place;
    place.head = block % static_cast<unsigned>(heads);
    int each;
    if (sequences.Given()) {
      const int chunk = order[turn];
      place.row = chunk < 0 ? -1 : sequences.owners[chunk];
      if (place.row < 0) return place;
      place.span = sequences(place.row, tokens);
      each = ChunksPerSplit(place.Chunks());
      place.chunk = chunk - static_cast<int>(place.span.first_chunk);
    } else {
      // The last chunks of all splits come first.
      const unsigned count = splits.count, all = static_cast<unsigned>(batch) * count;
      const unsigned relay = turn % all;
      place.row = relay / count;
      place.span = sequences(place.row, tokens);
      each = ChunksPerSplit(place.Chunks());
      place.chunk = (relay % count + 1) * each - 1 - turn / all;
      if (place.chunk >= place.Chunks()) place.row = -1;
    }
    place.split = place.chunk / each;
    const int behind = (place.split + 1) * each, last = place.Chunks();
    place.position = (behind < last ? behind : last) - 1 - place.chunk;
    return place;
  }
  // The number of the relay of a split.
  __device__ int64_t RelayOf(const RelayPlace& place) const {
    return splits.IndexOf(place.row, place.span, place.split) * heads + place.head;
  }
  // The state of a relay is where it goes in the end, or where the transition of its split had a factor.
  __device__ Baton BatonOf(const RelayPlace& place) const {
    const int64_t relay = RelayOf(place);
    Baton baton{nullptr, rows, columns, rounded + relay * (size * size / 8), done + relay};
    const int64_t of_all = place.row * heads + place.head;
    if (place.split == 0) {
      baton.data = end + of_all * rows * columns;
    } else {
      const int64_t order = splits.Count(place.span.Chunks()) - 1 - place.split;
      baton.data = splits.Transition<true>(of_all, heads, place.span, order) + size * size;
      baton.rows = baton.columns = size;
    }
    return baton;
  }
#endif
};

// Puts the states at their starts, counts nothing as done, and finds the order of chunks. The states between splits
// are in the memory of the splits.
cudaError_t BeginRelays(cudaStream_t stream, const Relays& relays);

}  // namespace rwkv_jax::cuda
