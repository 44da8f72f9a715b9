package pool

// Exposed is how other nodes read this one's arena by one-sided reads.
type Exposed struct {
	Protocol string // "tcp" or "rdma"
	Target   string // by which their readers reach this one; 1 to MaxTarget bytes
	Address  uint64 // of the arena's first byte there
}

// MaxTarget bounds Exposed.Target, bytes.
const MaxTarget = 256

// Pull is a piece of another node's memory to be read into this one's arena.
type Pull struct {
	Offset  int64  // in the arena
	Length  int64  // bytes, at least 1
	Address uint64 // at the other node
}
