// The update of the device slot table: one thread a triple.
//
// The caller sends one triple a (layer, expert), so no two threads write the same word and their order is free.

extern "C" __global__ void ds41_slot_table_set(
    int* __restrict__ table,          // [n_layers][n_experts]
    const int* __restrict__ triples,  // [1 + 3 * capacity]: count, then (layer, expert, slot)
    unsigned int n_layers,
    unsigned int n_experts,
    unsigned int capacity) {
    unsigned int count = triples[0];
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count || i >= capacity) return;
    const int* triple = triples + 1 + 3 * i;
    unsigned int layer = triple[0], expert = triple[1];
    // A triple outside the table is a bug of the host; it must not become a write somewhere else.
    if (layer < n_layers && expert < n_experts) table[layer * n_experts + expert] = triple[2];
}
