package mover

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/kvagent/kvagent/cudaipc"
)

// The messages between an agent and its mover. Both are the same binary, so the form has no
// versions: one byte of kind, eight of number (a request's, or a ticket), and fields as the
// functions below put them.
const (
	msgSetup  byte = iota + 1 // agent: JSON of Setup, with the arena's descriptor. Answered when the device is open
	msgImport                 // agent: JSON of an Import, with its descriptors; the proof's first
	msgClose                  // agent: a peer
	msgPoll                   // agent: JSON of a Wait
	msgCopy                   // agent: a copy; its number is the ticket
	msgPing                   // agent
	msgInfo                   // agent: asks for the state of the device
	msgAnswer                 // mover: of setup, import and close; of a poll with JSON of a State
	msgDone                   // mover: the end of a copy
	msgPong                   // mover
	msgInfoIs                 // mover: of msgInfo, JSON or nothing
	msgLost                   // mover: its device is lost (ErrLost), the agent ends it
	msgSum                    // agent: JSON of a Sample; its number is the ticket. Its end is msgDone
)

func putHead(b []byte, kind byte, number uint64) []byte {
	return binary.LittleEndian.AppendUint64(append(b[:0], kind), number)
}

func put8(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

func put32(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(b, v) }
func put64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }

func putText(b []byte, s string) []byte { return append(put32(b, uint32(len(s))), s...) }

// fields decodes these fields. All are zero after the first that is missing or invalid.
type fields struct {
	rest []byte
	bad  bool
}

func (f *fields) take(n int) []byte {
	if f.bad || n < 0 || n > len(f.rest) {
		f.bad = true
		return nil
	}
	b := f.rest[:n]
	f.rest = f.rest[n:]
	return b
}

func (f *fields) u8() byte {
	if b := f.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (f *fields) flag() bool {
	v := f.u8()
	f.bad = f.bad || v > 1
	return v == 1
}

func (f *fields) u32() uint32 {
	if b := f.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (f *fields) u64() uint64 {
	if b := f.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// count reads the length of a list whose elements have at least each bytes.
func (f *fields) count(each int) int {
	n := int(f.u32())
	if n*each > len(f.rest) {
		f.bad = true
		return 0
	}
	return n
}

func (f *fields) bytes() []byte { return f.take(f.count(1)) }

// plain are the values that lie in a message as they lie in memory.
type plain interface {
	cudaipc.Block | cudaipc.Run | uint32 | bool
}

// bytesOf returns the memory of a list.
func bytesOf[T plain](list []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(list))), len(list)*int(unsafe.Sizeof(*new(T))))
}

func putList[T plain](b []byte, list []T) []byte {
	return append(put32(b, uint32(len(list))), bytesOf(list)...)
}

// takeList reads a list into the memory of another one, if that suffices.
func takeList[T plain](f *fields, into []T) []T {
	n := f.count(int(unsafe.Sizeof(*new(T))))
	into = slices.Grow(into[:0], n)[:n]
	copy(bytesOf(into), f.take(len(bytesOf(into))))
	return into
}

// end returns an error unless all fields were there and nothing else was.
func (f *fields) end(what string) error {
	if f.bad || len(f.rest) > 0 {
		return fmt.Errorf("%s: %w", what, errWire)
	}
	return nil
}

// sentinels are the errors that keep their meaning on the wire; their numbers are their places.
var sentinels = [...]error{
	nil, cudaipc.ErrPeer, cudaipc.ErrRange, cudaipc.ErrBusy, cudaipc.ErrKind, cudaipc.ErrTicket, cudaipc.ErrNoCUDA,
}

// deviceError is an error of the mover's device in the agent.
type deviceError struct {
	text     string
	sentinel error
}

func (e *deviceError) Error() string { return e.text }
func (e *deviceError) Unwrap() error { return e.sentinel }

// putError puts whether there is an error, which sentinel it wraps, and its text.
func putError(b []byte, err error) []byte {
	if err == nil {
		return append(b, 0)
	}
	which := 0
	for i := 1; i < len(sentinels); i++ {
		if errors.Is(err, sentinels[i]) {
			which = i
			break
		}
	}
	return putText(append(b, 1, byte(which)), err.Error())
}

func (f *fields) error() error {
	if !f.flag() {
		return nil
	}
	which := int(f.u8())
	text := string(f.bytes())
	if which >= len(sentinels) {
		f.bad = true
		return nil
	}
	return &deviceError{text, sentinels[which]}
}

// putCopy puts a copy. Its number is the ticket.
func putCopy(b []byte, t cudaipc.Ticket, c *cudaipc.Copy) []byte {
	b = put32(putHead(b, msgCopy, uint64(t)), uint32(c.Peer))
	b = put8(append(b, byte(c.Dir)), c.Sum)
	return putList(putList(b, c.Blocks), c.Runs)
}

// takeCopy reads a copy into c, whose slices are used again.
func takeCopy(f *fields, c *cudaipc.Copy) error {
	c.Peer, c.Dir, c.Sum = cudaipc.PeerID(f.u32()), cudaipc.Direction(f.u8()), f.flag()
	c.Blocks = takeList(f, c.Blocks)
	c.Runs = takeList(f, c.Runs)
	return f.end("copy")
}

// putDone puts the end of a copy.
func putDone(b []byte, t cudaipc.Ticket, d *cudaipc.Done) []byte {
	b = putError(putHead(b, msgDone, uint64(t)), d.Err)
	return put64(putList(putList(b, d.Sums), d.Bad), uint64(d.SumTime))
}

func takeDone(f *fields) (d cudaipc.Done, err error) {
	d.Err = f.error()
	d.Sums, d.Bad = takeList(f, d.Sums), takeList(f, d.Bad)
	d.SumTime = time.Duration(f.u64())
	return d, f.end("done")
}

// putAnswer puts the answer to a request: its error, or what it is answered, as JSON.
func putAnswer(number uint64, err error, v any) []byte {
	b := putError(putHead(nil, msgAnswer, number), err)
	if err == nil && v != nil {
		b = append(b, toJSON(v)...)
	}
	return b
}

func takeAnswer(f *fields, into any) error {
	err := f.error()
	if err != nil || f.bad || into == nil {
		return cmp.Or(f.end("answer"), err)
	}
	return takeJSON(f, into)
}

// putJSON puts a message that is rare enough to be JSON.
func putJSON(b []byte, kind byte, number uint64, v any) []byte {
	return append(putHead(b, kind, number), toJSON(v)...)
}

func toJSON(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // they have texts, numbers and booleans
	}
	return text
}

func takeJSON(f *fields, v any) error {
	if err := json.Unmarshal(f.rest, v); err != nil {
		return fmt.Errorf("%w: %w", errWire, err)
	}
	return nil
}

// maxHandle is the longest handle of a region that is carried, bytes.
const maxHandle = 256

// putImport encodes an import and lists its descriptors: the proof's, then the regions'.
func putImport(b []byte, number uint64, im *cudaipc.Import) (msg []byte, fds []int) {
	if im.Proof > 0 {
		fds = append(fds, im.Proof)
	}
	for i := range im.Regions {
		if im.Regions[i].HasFD() {
			fds = append(fds, im.Regions[i].FD)
		}
	}
	return putJSON(b, msgImport, number, im), fds
}

// takeImport decodes an import, which owns the descriptors unless there is an error.
func takeImport(f *fields, fds []int) (im cudaipc.Import, err error) {
	if err = takeJSON(f, &im); err != nil {
		return im, err
	}
	wanted := []*int{}
	if im.Proof > 0 {
		wanted = append(wanted, &im.Proof)
	}
	for i := range im.Regions {
		if r := &im.Regions[i]; r.HasFD() {
			wanted = append(wanted, &r.FD)
		}
	}
	if len(wanted) != len(fds) {
		return im, fmt.Errorf("import with %d descriptors of %d: %w", len(fds), len(wanted), errWire)
	}
	for i, fd := range wanted {
		*fd = fds[i]
	}
	return im, nil
}
