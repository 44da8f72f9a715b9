package mooncake

import (
	"bytes"
	"fmt"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvagent/kvagent/pool"
)

// The frames between Reads and its helper are described in python/kvagent/mooncake_reads.py.

// maxPulls bounds the pieces of one read.
const maxPulls = 128

func encodeReadsHello(o *ReadsOptions) []byte {
	a := newArray(6)
	a.ints(wireVersion)
	a.text(o.Host)
	a.text(o.Protocol)
	a.text(o.Devices)
	a.ints(int64(o.Concurrency), int64(len(o.Arena.Base)))
	return a.frame()
}

// readsWelcome is the helper's first frame: how others reach its memory, or why they cannot.
type readsWelcome struct {
	reason, target string
	base           int64
}

func (w *readsWelcome) encode() []byte {
	a := newArray(4)
	a.ints(wireVersion)
	a.text(w.reason)
	a.text(w.target)
	a.ints(w.base)
	return a.frame()[4:]
}

func decodeReadsWelcome(b []byte) (w readsWelcome, err error) {
	d := msgpack.NewDecoder(bytes.NewReader(b))
	n, err := d.DecodeArrayLen()
	if err != nil || n != 4 {
		return w, errFrame
	}
	version, err := d.DecodeInt64()
	if err != nil || version != wireVersion {
		return w, fmt.Errorf("%w: version %d, must be %d (the Python package is of another release)",
			errFrame, version, wireVersion)
	}
	if w.reason, err = d.DecodeString(); err == nil {
		if w.target, err = d.DecodeString(); err == nil {
			w.base, err = d.DecodeInt64()
		}
	}
	if err != nil || len(w.reason) > maxReason || len(w.target) > pool.MaxTarget || w.base < 0 ||
		!bytes.Equal(w.encode(), b) {
		return readsWelcome{}, errFrame
	}
	return w, nil
}

func encodePulls(id uint64, target string, pulls []pool.Pull) []byte {
	a := newArray(3)
	a.ints(int64(id))
	a.text(target)
	a.list(len(pulls))
	for _, p := range pulls {
		a.list(3)
		a.ints(p.Offset, int64(p.Address), p.Length)
	}
	return a.frame()
}
