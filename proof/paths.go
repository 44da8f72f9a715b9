package proof

import (
	"fmt"
	"math"

	"github.com/kvagent/kvagent/cudaipc"
)

// checkPaths measures each way to copy at each length, so that one run on a GPU says which is for what. checkCopies shows what the table
// makes of them.
func checkPaths(b *bench) error {
	e, err := b.engine(false, 2*b.sizes.region)
	if err != nil {
		return err
	}
	for _, path := range []cudaipc.CopyPath{cudaipc.CopySingle, cudaipc.CopyBatch, cudaipc.CopyRect, cudaipc.CopyKernel} {
		if err := b.path(e, path); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// path measures one, unless this driver has it not.
func (b *bench) path(e *child, path cudaipc.CopyPath) error {
	flat := path
	if path == cudaipc.CopyRect {
		flat = cudaipc.CopySingle
	}
	table := &cudaipc.CopyTable{Rules: []cudaipc.CopyRule{{UpTo: math.MaxUint64, Flat: flat, Rows: path}}}
	if err := b.openWith(b.sizes.region, table); err != nil {
		return err
	}
	i := b.device.Info()
	if path == cudaipc.CopyBatch && !i.Batch || path == cudaipc.CopyKernel && i.KernelError != "" {
		b.line.Facts[string(path)] = "not with this driver: " + i.KernelError
		return nil
	}
	peer, err := b.admit(e, true)
	if err != nil {
		return err
	}
	text := ""
	for _, fragment := range fragments {
		for dir, way := range []string{"d2h", "h2d"} {
			rate, err := b.rate([]*cudaipc.Copy{b.scattered(peer, cudaipc.Direction(dir), fragment.bytes)})
			if err != nil {
				return fmt.Errorf("%s %s: %w", fragment.name, way, err)
			}
			b.line.Figures[fmt.Sprintf("%s_%s_%s_gib_s", path, fragment.name, way)] = rate / gib
			text += fmt.Sprintf(" %.1f", rate/gib)
		}
	}
	b.line.say("%s%s GiB/s", path, text)
	return b.device.Close(peer)
}
