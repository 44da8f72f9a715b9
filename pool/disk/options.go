package disk

import (
	"fmt"
	"path/filepath"
	"time"
)

// Limits of the options.
const (
	MaxDirs         = 64
	MinSegmentBytes = 256 << 10
	MaxSegmentBytes = 4 << 30
	MinWriteBytes   = 16 << 10
	MaxWriteBytes   = 256 << 20
	MaxWriteDepth   = 16
	MaxReadDepth    = 1024
	MinSegments     = 4       // that a directory must have room for
	MaxSegments     = 1 << 14 // of a directory; each costs a file descriptor
	MaxDirBytes     = 1 << 46

	probeMax     = time.Minute
	segmentShare = 128 // by default a segment is this share of the smallest directory
)

// Dir is one directory, preferably on a device of its own.
type Dir struct {
	Path string
	// Bytes of disk that the store may use there, all files together. It evicts before it would
	// exceed that.
	Bytes int64
}

// Options of a store. A zero value means the default, where there is one.
type Options struct {
	Dirs []Dir // 1 to MaxDirs

	// SegmentBytes is the size of a segment file, MinSegmentBytes to MaxSegmentBytes; default 1/128
	// of the smallest directory, 16 MiB to 256 MiB where that fits.
	SegmentBytes int64
	// WriteBytes is the largest size of a write, MinWriteBytes to MaxWriteBytes and at most half a
	// segment; a larger block is not stored; default 8 MiB.
	WriteBytes int
	WriteDepth int // writes at once in each directory, 1 to MaxWriteDepth; default 8
	ReadDepth  int // reads at once in each directory, 1 to MaxReadDepth; default 32

	// OnState is called with the reason when a directory changes its state, and once with
	// ErrBuffered where the page cache is used. It must not call the store. It may be nil.
	OnState func(path string, from, to State, reason error)

	probeEvery time.Duration // first wait before a lost directory is tried again, doubled up to probeMax
	faults     faults        // injected by tests between the store and the file system
}

func (o *Options) setDefaults() {
	least := int64(MaxDirBytes)
	for i := range o.Dirs {
		least = min(least, o.Dirs[i].Bytes)
	}
	orElse(&o.SegmentBytes, max(
		MinSegmentBytes,
		min(256<<20, max(least/segmentShare, 16<<20, 2*int64(o.WriteBytes)), least/(2*MinSegments))&^(pageBytes-1),
	))
	orElse(&o.WriteBytes, int(min(8<<20, o.SegmentBytes/2&^(pageBytes-1))))
	orElse(&o.WriteDepth, 8)
	orElse(&o.ReadDepth, 32)
	orElse(&o.probeEvery, time.Second)
}

func orElse[T comparable](value *T, other T) {
	if *value == *new(T) {
		*value = other
	}
}

func (o *Options) check() error {
	for _, r := range []struct {
		name             string
		value, low, high int64
	}{
		{"the number of Dirs", int64(len(o.Dirs)), 1, MaxDirs},
		{"SegmentBytes", o.SegmentBytes, MinSegmentBytes, MaxSegmentBytes},
		{"WriteBytes", int64(o.WriteBytes), MinWriteBytes, min(MaxWriteBytes, o.SegmentBytes/2)},
		{"WriteDepth", int64(o.WriteDepth), 1, MaxWriteDepth},
		{"ReadDepth", int64(o.ReadDepth), 1, MaxReadDepth},
	} {
		if r.value < r.low || r.value > r.high {
			return fmt.Errorf("disk: %s is %d, must be %d to %d", r.name, r.value, r.low, r.high)
		}
	}
	if o.SegmentBytes%pageBytes != 0 || o.WriteBytes%pageBytes != 0 {
		return fmt.Errorf("disk: SegmentBytes is %d and WriteBytes %d, must be a multiple of %d", o.SegmentBytes,
			o.WriteBytes, pageBytes)
	}
	return o.checkDirs()
}

func (o *Options) checkDirs() error {
	seen := map[string]bool{}
	for i := range o.Dirs {
		d := &o.Dirs[i]
		if !filepath.IsAbs(d.Path) {
			return fmt.Errorf("disk: Dirs[%d].Path is %q, must be an absolute path", i, d.Path)
		}
		d.Path = filepath.Clean(d.Path)
		if seen[d.Path] {
			return fmt.Errorf("disk: Dirs has %s twice", d.Path)
		}
		seen[d.Path] = true
		low, high := MinSegments*o.SegmentBytes, min(MaxDirBytes, MaxSegments*o.SegmentBytes)
		if d.Bytes < low || d.Bytes > high {
			return fmt.Errorf(
				"disk: Dirs[%d].Bytes is %d, must be %d to %d with segments of %d", i, d.Bytes, low, high,
				o.SegmentBytes,
			)
		}
	}
	return nil
}
