//go:build cuda

package driver

import "errors"

// Range is a range of addresses with pieces of physical memory in it, side by side.
type Range struct {
	Start  Addr
	Size   uint64
	mapped []uint64 // sizes of the pieces, in their order
	used   uint64   // bytes of these
}

// Whole returns n rounded up to whole granules.
func Whole(n, granule uint64) uint64 { return (n + granule - 1) / granule * granule }

// NewRange reserves a range in which nothing is mapped yet.
func NewRange(size uint64) (*Range, error) {
	start, err := Reserve(size)
	return &Range{Start: start, Size: size}, err
}

// Map maps a whole piece after those that are mapped already.
func (r *Range) Map(p Physical, size uint64) error {
	if err := p.Map(r.Start+Addr(r.used), size); err != nil {
		return err
	}
	r.mapped = append(r.mapped, size)
	r.used += size
	return nil
}

// Close unmaps the pieces, each as it was mapped, and releases the range.
func (r *Range) Close() error {
	var errs []error
	at := r.Start
	for _, n := range r.mapped {
		errs = append(errs, Unmap(at, n))
		at += Addr(n)
	}
	return errors.Join(append(errs, Unreserve(r.Start, r.Size))...)
}
