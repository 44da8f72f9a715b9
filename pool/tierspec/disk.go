package tierspec

import (
	"errors"
	"net/url"
	"strings"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/pool/disk"
)

// SchemeDisk is the scheme of disks of the node.
const SchemeDisk = "disk"

// readDiskTier reads disk:DIR?capacity=SIZE. Further directories, each of the same capacity, are given by dirs=DIR,DIR.
func readDiskTier(u *url.URL, o *options) func(*Needs) (Opened, error) {
	capacity := o.size("capacity", disk.MinSegments*disk.MinSegmentBytes, disk.MaxDirBytes)
	if capacity == 0 {
		o.fail(errors.New("capacity must be given: the bytes of disk it may use in each directory"))
	}
	d := disk.Options{
		SegmentBytes: o.size("segment", disk.MinSegmentBytes, disk.MaxSegmentBytes), WriteBytes: int(o.size("write-bytes", disk.MinWriteBytes, disk.MaxWriteBytes)),
		WriteDepth: o.count("write-depth", disk.MaxWriteDepth), ReadDepth: o.count("read-depth", disk.MaxReadDepth),
		BudgetBytesPerDay: o.size("budget-per-day", 0, disk.MaxDirBytes),
		Admission:         disk.Admission{Again: o.choice("admit", "all", "all", "again") == "again"},
	}
	dirs := []string{u.Path}
	if more := o.text("dirs", ""); more != "" {
		dirs = append(dirs, strings.Split(more, ",")...)
	}
	for _, dir := range dirs {
		d.Dirs = append(d.Dirs, disk.Dir{Path: dir, Bytes: capacity})
	}
	return func(n *Needs) (Opened, error) {
		d.OnState = func(path string, from, to disk.State, reason error) {
			n.Log.Warn("disk", zap.String("dir", path), zap.Stringer("from", from), zap.Stringer("to", to), zap.Error(reason))
		}
		s, err := disk.Open(d)
		if err != nil {
			return Opened{}, err
		}
		return Opened{Store: s, Local: true, Close: s.Close}, nil
	}
}
