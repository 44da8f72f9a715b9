package pool

// Prober is an optional form of Slots whose memory may have pages that went bad.
type Prober interface {
	// Probe reads a byte of every page of a slot that the caller holds by a reservation or a pin,
	// and reports whether all pages could be read. It is for a slot of which a copy failed, or
	// faulted. A page that cannot be read is retired: what is stored in it is dropped at once, and
	// no slot that overlaps it is given out again. The caller ends its reservation or pin as ever.
	Probe(s Slot) bool
}

// BadMemory is what a pool lost of its memory to pages that cannot be read.
type BadMemory struct {
	Pages    int64  // retired
	MaxPages int64  // from this number on the pool is not healthy; 0: it has no such limits
	Bytes    int64  // that are not given out any more
	MaxBytes int64  // from this number on the pool is not healthy
	Dropped  uint64 // entries dropped for it
	Faults   uint64 // times that a page of the pool's file beside the arena could not be read or written
}

// Healthy reports whether less is retired than the pool bears.
func (b *BadMemory) Healthy() bool {
	return b.MaxPages == 0 || b.Pages < b.MaxPages && b.Bytes < b.MaxBytes
}
