// Package kernel is the copy kernel: its text, which a driver compiles when it loads it, and the
// format of the list that it reads. It is for fragments so small that a copy engine's set-up
// costs more than their bytes.
package kernel

import (
	_ "embed"
	"encoding/binary"
)

// PTX is the module, for cuModuleLoadData. Its instruction set is of 2020 (PTX ISA 7.0, compute
// capability 7.0), so that drivers from CUDA 11 on take it for each GPU since.
//
//go:embed copy.ptx
var PTX string

// Name is the function in the module. Its parameters are the address of a list, u64, and the number
// of its entries, u32.
const Name = "kvagent_copy"

// How it is launched. A few thread blocks only: they take the place of an engine's.
const (
	Blocks  = 8
	Threads = 512 // of a block; a multiple of 32
)

// EntryBytes is the size of an entry of a list.
const EntryBytes = 24

// Put makes entry i of a list: n bytes from src to dst, addresses as the GPU sees them. The two do
// not overlap, nor do the destinations of one list.
func Put(list []byte, i int, dst, src, n uint64) {
	entry := list[i*EntryBytes : (i+1)*EntryBytes]
	binary.LittleEndian.PutUint64(entry, dst)
	binary.LittleEndian.PutUint64(entry[8:], src)
	binary.LittleEndian.PutUint64(entry[16:], n)
}
