package mooncake

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/vmihailenco/msgpack/v5"
)

// Limits of the frames between the store and its helper, which python/kvagent/mooncake.py
// describes.
const (
	wireVersion = 2
	maxFrame    = 1 << 20 // bytes
	maxKeys     = 128     // of one request
	maxReason   = 4096    // bytes of a helper's error text
)

type operation uint8

const (
	opPut    operation = 1
	opGet    operation = 2
	opExists operation = 3
	opDelete operation = 4
)

// The memory areas of a place.
const (
	areaBounce = 0
	areaArena  = 1
)

// place is where a value is: its header in the bounce memory, its data in an area.
type place struct {
	key                    string
	area                   int64
	header, offset, length int64 // bytes
}

// array encodes a frame: its length and one msgpack array, everything in its shortest form.
type array struct {
	out bytes.Buffer
	enc *msgpack.Encoder
}

func newArray(n int) *array {
	a := &array{}
	a.out.Write(make([]byte, 4))
	a.enc = msgpack.NewEncoder(&a.out)
	a.list(n)
	return a
}

// Writes to memory do not fail.
func (a *array) list(n int)    { _ = a.enc.EncodeArrayLen(n) }
func (a *array) text(s string) { _ = a.enc.EncodeString(s) }
func (a *array) ints(all ...int64) {
	for _, v := range all {
		_ = a.enc.EncodeInt(v)
	}
}

func (a *array) frame() []byte {
	b := a.out.Bytes()
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return b
}

// encodeHello encodes the first frame.
func encodeHello(o *Options, host string) []byte {
	a := newArray(4)
	a.ints(wireVersion)
	a.list(9)
	a.text(host)
	a.text(o.Metadata)
	a.ints(o.Segment, o.LocalBuffer)
	a.text(o.Protocol)
	a.text(o.Devices)
	a.text(o.Master)
	a.ints(int64(o.Replicas), int64(o.Concurrency), o.Bounce, int64(len(o.Arena.Base)))
	return a.frame()
}

// encodeValues encodes a put or a get.
func encodeValues(id uint64, op operation, places []place) []byte {
	a := newArray(3)
	a.ints(int64(id), int64(op))
	a.list(len(places))
	for i := range places {
		p := &places[i]
		a.list(5)
		a.text(p.key)
		a.ints(p.header, p.area, p.offset, p.length)
	}
	return a.frame()
}

// encodeKeys encodes a question or a delete.
func encodeKeys(id uint64, op operation, keys []string) []byte {
	a := newArray(3)
	a.ints(int64(id), int64(op))
	a.list(len(keys))
	for _, k := range keys {
		a.text(k)
	}
	return a.frame()
}

// readFrame reads the msgpack of the next frame.
func readFrame(r io.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxFrame {
		return nil, fmt.Errorf("mooncake: frame of %d bytes, allowed: at most %d", n, maxFrame)
	}
	b := make([]byte, n)
	_, err := io.ReadFull(r, b)
	return b, err
}

var errFrame = errors.New("mooncake: invalid frame from the helper")

// welcome is a helper's first frame: it has connected, or why not.
type welcome struct{ reason, name string }

func decodeWelcome(b []byte) (w welcome, err error) {
	d := msgpack.NewDecoder(bytes.NewReader(b))
	n, err := d.DecodeArrayLen()
	if err != nil || n != 3 {
		return w, errFrame
	}
	version, err := d.DecodeInt64()
	if err != nil || version != wireVersion {
		return w, fmt.Errorf("%w: version %d, must be %d (the Python package is of another release)",
			errFrame, version, wireVersion)
	}
	w.reason, err = d.DecodeString()
	if err == nil {
		w.name, err = d.DecodeString()
	}
	a := newArray(3)
	a.ints(wireVersion)
	a.text(w.reason)
	a.text(w.name)
	if err != nil || len(w.reason) > maxReason || len(w.name) > MaxText || !bytes.Equal(a.frame()[4:], b) {
		return welcome{}, errFrame
	}
	return w, nil
}

// reply is the answer to a request: a code for each key.
type reply struct {
	id    uint64
	codes []int64
}

func decodeReply(b []byte) (reply, error) {
	d := msgpack.NewDecoder(bytes.NewReader(b))
	n, err := d.DecodeArrayLen()
	if err != nil || n != 2 {
		return reply{}, errFrame
	}
	id, err := d.DecodeInt64()
	if err != nil {
		return reply{}, errFrame
	}
	if n, err = d.DecodeArrayLen(); err != nil || n < 1 || n > maxKeys {
		return reply{}, errFrame
	}
	r := reply{uint64(id), make([]int64, n)}
	for i := range r.codes {
		if r.codes[i], err = d.DecodeInt64(); err != nil {
			return reply{}, errFrame
		}
	}
	if id < 0 || !bytes.Equal(r.encode(), b) {
		return reply{}, errFrame
	}
	return r, nil
}

// encode encodes a reply as a helper does.
func (r *reply) encode() []byte {
	a := newArray(2)
	a.ints(int64(r.id))
	a.list(len(r.codes))
	a.ints(r.codes...)
	return a.frame()[4:]
}
