//go:build cuda

package cudaipc

import (
	"errors"
	"fmt"

	"github.com/kvagent/kvagent/cudaipc/driver"
)

// virtual is a range of addresses with the pieces of one region in it, side by side.
type virtual struct {
	start  driver.Addr
	size   uint64
	mapped []uint64 // sizes of the pieces, in their order
}

// openVirtual maps the pieces of a region side by side. The region may end within the last granule of its last piece.
func (d *CUDA) openVirtual(p *gpuPeer, im *Import, parts []Region) (*region, error) {
	granule, err := d.ctx.Granularity()
	if err != nil {
		return nil, err
	}
	var size uint64
	for i := range parts {
		if parts[i].Size%granule != 0 && i < len(parts)-1 {
			return nil, fmt.Errorf("piece %d: %d bytes, want a multiple of %d: %w", i, parts[i].Size, granule, ErrRange)
		}
		if size += parts[i].Size; size > MaxPeerBytes {
			return nil, fmt.Errorf("piece %d: more than %d bytes in all: %w", i, int64(MaxPeerBytes), ErrRange)
		}
	}
	v := virtual{size: whole(size, granule)}
	if v.start, err = driver.Reserve(v.size); err != nil {
		return nil, err
	}
	if err = v.fill(im, parts, granule); err == nil {
		err = d.ctx.Allow(v.start, v.size)
	}
	if err != nil {
		return nil, errors.Join(err, v.close())
	}
	p.ranges = append(p.ranges, v)
	d.imports.Add(1)
	return &region{size: size, addr: uint64(v.start)}, nil
}

// whole is n rounded up to granules.
func whole(n, granule uint64) uint64 { return (n + granule - 1) / granule * granule }

func (v *virtual) fill(im *Import, parts []Region, granule uint64) error {
	at := v.start
	for i := range parts {
		size := whole(parts[i].Size, granule)
		if err := mapPiece(&parts[i], at, size); err != nil {
			return fmt.Errorf("piece %d of %d: %w", i, len(parts), err)
		}
		v.mapped = append(v.mapped, size)
		if err := im.gone(); err != nil {
			return err
		}
		at += driver.Addr(size)
	}
	return nil
}

// mapPiece opens one descriptor and maps its memory, which the mapping then keeps.
func mapPiece(r *Region, at driver.Addr, size uint64) error {
	piece, err := driver.ImportPhysical(r.FD)
	if err != nil {
		return fmt.Errorf("%w: %w: the descriptor must be of cuMemExportToShareableHandle, of memory that was made with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR "+
			"(PyTorch's expandable segments are; vLLM's sleep mode's is not: start the engine without enable_sleep_mode), and on this GPU", ErrKind, err)
	}
	err = piece.Map(at, size)
	return errors.Join(err, piece.Release())
}

// close takes the pieces away, each as it was mapped, and gives the range back.
func (v *virtual) close() error {
	var errs []error
	at := v.start
	for _, n := range v.mapped {
		errs = append(errs, driver.Unmap(at, n))
		at += driver.Addr(n)
	}
	return errors.Join(append(errs, driver.Unreserve(v.start, v.size))...)
}
