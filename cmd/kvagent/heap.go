package main

// heapFloor is memory that is never touched, bytes: it costs address space alone. What the agent keeps of blocks lies off the heap, so that its heap is a few MiB and garbage of
// 4 MiB begins a collection: with a shared tier that is several a second, and each holds look-ups up when the machine is busy. With the floor it takes garbage of 64 MiB and more.
const heapFloor = 64 << 20

// raiseHeap gives the floor, which must be kept alive as long as it shall count.
func raiseHeap() []byte { return make([]byte, heapFloor) }
