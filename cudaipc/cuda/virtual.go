//go:build cuda

package cuda

import (
	"errors"
	"fmt"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

// openVirtual maps the pieces of a region side by side. The region may end within the last
// granule of its last piece.
func (d *Device) openVirtual(p *peer, im *cudaipc.Import, parts []cudaipc.Region) (*cudaipc.Opened, error) {
	granule, err := d.ctx.Granularity()
	if err != nil {
		return nil, err
	}
	var size uint64
	for i := range parts {
		if parts[i].Size%granule != 0 && i < len(parts)-1 {
			return nil, fmt.Errorf("piece %d: %d bytes, want a multiple of %d: %w", i, parts[i].Size, granule,
				cudaipc.ErrRange)
		}
		if size += parts[i].Size; size > cudaipc.MaxPeerBytes {
			return nil, fmt.Errorf("piece %d: more than %d bytes in all: %w", i, int64(cudaipc.MaxPeerBytes),
				cudaipc.ErrRange)
		}
	}
	v, err := driver.NewRange(driver.Whole(size, granule))
	if err != nil {
		return nil, err
	}
	if err = fill(v, im, parts, granule); err == nil {
		err = d.ctx.Allow(v.Start, v.Size)
	}
	if err != nil {
		return nil, errors.Join(err, v.Close())
	}
	p.ranges = append(p.ranges, v)
	d.imports.Add(1)
	return &cudaipc.Opened{Size: size, Addr: uint64(v.Start)}, nil
}

// fill maps the pieces of a region into its range.
func fill(v *driver.Range, im *cudaipc.Import, parts []cudaipc.Region, granule uint64) error {
	for i := range parts {
		if err := mapPiece(v, &parts[i], driver.Whole(parts[i].Size, granule)); err != nil {
			return fmt.Errorf("piece %d of %d: %w", i, len(parts), err)
		}
		if err := im.CheckCancelled(); err != nil {
			return err
		}
	}
	return nil
}

// mapPiece opens one descriptor and maps its memory, which the mapping then keeps.
func mapPiece(v *driver.Range, r *cudaipc.Region, size uint64) error {
	piece, err := driver.ImportPhysical(r.FD)
	if err != nil {
		return fmt.Errorf("%w: %w: the descriptor must be of cuMemExportToShareableHandle, "+
			"of memory that was made with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR "+
			"(PyTorch's expandable segments are; vLLM's sleep mode's is not: "+
			"start the engine without enable_sleep_mode), and on this GPU", cudaipc.ErrKind, err)
	}
	err = v.Map(piece, size)
	return errors.Join(err, piece.Release())
}
