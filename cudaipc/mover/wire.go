package mover

import (
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
// versions: one byte of kind, eight of number (a request's, or a copy's), four of the length of a
// head in JSON, the head, and lists as they lie in memory.
const (
	msgSetup  byte = iota + 1 // agent: Setup, with the arena's descriptor. Answered when the device is open
	msgImport                 // agent: Import, with its descriptors; the proof's first
	msgClose                  // agent: number of a peer, or allPeers
	msgPoll                   // agent: pollHead
	msgCopy                   // agent: no JSON, copyHead and its lists; the end has the same number
	msgSum                    // agent: sumHead. Its end is msgDone
	msgPing                   // agent
	msgAnswer                 // mover: answer, to setup, import, close and poll
	msgDone                   // mover: a deviceError or none, doneHead, its lists: the end of a copy
	msgPong                   // mover
	msgInfo                   // mover: CUDAInfo, from time to time, and when its device is lost
)

// message is a message that was received.
type message struct {
	kind   byte
	number uint64
	head   []byte
	lists  []byte
}

const fixedBytes = 1 + 8 + 4

// pack encodes a message into the memory of b, if that suffices. A head of nil is none.
func pack(b []byte, kind byte, number uint64, head any, lists ...[]byte) []byte {
	var text []byte
	if head != nil {
		var err error
		if text, err = json.Marshal(head); err != nil {
			panic(err) // they have texts, numbers and booleans
		}
	}
	b = binary.LittleEndian.AppendUint64(append(b[:0], kind), number)
	b = append(binary.LittleEndian.AppendUint32(b, uint32(len(text))), text...)
	for _, list := range lists {
		b = append(b, list...)
	}
	return b
}

func unpack(b []byte) (m message, err error) {
	if len(b) < fixedBytes {
		return m, fmt.Errorf("%d bytes: %w", len(b), errWire)
	}
	m.kind, m.number = b[0], binary.LittleEndian.Uint64(b[1:])
	n, rest := uint64(binary.LittleEndian.Uint32(b[9:])), b[fixedBytes:]
	if n > uint64(len(rest)) {
		return m, fmt.Errorf("message %d with a head of %d bytes: %w", m.kind, n, errWire)
	}
	m.head, m.lists = rest[:n], rest[n:]
	return m, nil
}

// read reads the head of a message.
func (m *message) read(v any) error {
	if err := json.Unmarshal(m.head, v); err != nil {
		return fmt.Errorf("message %d: %w: %w", m.kind, errWire, err)
	}
	return nil
}

// plain are the values that lie in a message as they lie in memory.
type plain interface {
	cudaipc.Block | cudaipc.Run | uint32 | byte | bool | copyHead | doneHead
}

// bytesOf returns the memory of a list.
func bytesOf[T plain](list []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(list))), len(list)*int(unsafe.Sizeof(*new(T))))
}

// takeList reads the next list of a message into the memory of another one, if that suffices.
func takeList[T plain](m *message, n int, into []T) ([]T, error) {
	if n < 0 || n > len(m.lists)/int(unsafe.Sizeof(*new(T))) {
		return nil, fmt.Errorf("message %d with a list of %d: %w", m.kind, n, errWire)
	}
	into = slices.Grow(into[:0], n)[:n]
	m.lists = m.lists[copy(bytesOf(into), m.lists):]
	return into, nil
}

// sentinels are the errors that keep their meaning on the wire; their numbers are their places.
var sentinels = [...]error{
	cudaipc.ErrPeer, cudaipc.ErrRange, cudaipc.ErrBusy, cudaipc.ErrKind, cudaipc.ErrNoCUDA,
}

// deviceError is an error of the mover's device in the agent.
type deviceError struct {
	Text     string
	Sentinel int // that it wraps; beyond the list: none
}

func (e *deviceError) Error() string { return e.Text }

func (e *deviceError) Unwrap() error {
	if e.Sentinel < 0 || e.Sentinel >= len(sentinels) {
		return nil
	}
	return sentinels[e.Sentinel]
}

// carried returns an error as it is sent.
func carried(err error) *deviceError {
	if err == nil {
		return nil
	}
	which := slices.IndexFunc(sentinels[:], func(s error) bool { return errors.Is(err, s) })
	return &deviceError{err.Error(), which}
}

// arrived returns an error that was sent, which is nil if there is none.
func arrived(e *deviceError) error {
	if e == nil {
		return nil
	}
	return e
}

// answer answers a request; State is that of a poll.
type answer struct {
	Err   *deviceError
	State cudaipc.State
}

// allPeers stands for the device in a msgClose.
const allPeers = 0

type pollHead struct {
	Peer uint64 // number of the request that imported it; so in all heads
	cudaipc.Wait
}

type sumHead struct {
	Peer uint64
	*cudaipc.Sample
}

// copyHead precedes the lists that it counts; so does doneHead. JSON is slower than a small copy.
type copyHead struct {
	peer         uint64
	blocks, runs uint32
	dir          cudaipc.Direction
	sum          bool
}

func putCopy(b []byte, number, peer uint64, c *cudaipc.Copy) []byte {
	head := []copyHead{{peer, uint32(len(c.Blocks)), uint32(len(c.Runs)), c.Dir, c.Sum}}
	return pack(b, msgCopy, number, nil, bytesOf(head), bytesOf(c.Blocks), bytesOf(c.Runs))
}

// takeCopy reads a copy into c, whose slices are used again.
func takeCopy(m *message, c *cudaipc.Copy) (peer uint64, err error) {
	head, err := takeList[copyHead](m, 1, nil)
	if err != nil {
		return 0, err
	}
	c.Dir, c.Sum = head[0].dir, head[0].sum
	if c.Blocks, err = takeList(m, int(head[0].blocks), c.Blocks); err == nil {
		c.Runs, err = takeList(m, int(head[0].runs), c.Runs)
	}
	return head[0].peer, err
}

type doneHead struct {
	sumTime   time.Duration
	sums, bad uint32
}

func putDone(number uint64, d *cudaipc.Done) []byte {
	var failed any
	if d.Err != nil {
		failed = carried(d.Err)
	}
	head := []doneHead{{d.SumTime, uint32(len(d.Sums)), uint32(len(d.Bad))}}
	return pack(nil, msgDone, number, failed, bytesOf(head), bytesOf(d.Sums), bytesOf(d.Bad))
}

func takeDone(m *message) (d cudaipc.Done, err error) {
	if len(m.head) > 0 {
		failed := &deviceError{}
		d.Err = failed
		if err = m.read(failed); err != nil {
			return d, err
		}
	}
	head, err := takeList[doneHead](m, 1, nil)
	if err != nil {
		return d, err
	}
	var bad []byte // a bool of other bytes than 0 and 1 would be undefined
	d.SumTime = head[0].sumTime
	if d.Sums, err = takeList(m, int(head[0].sums), d.Sums); err == nil {
		bad, err = takeList(m, int(head[0].bad), bad)
	}
	if d.Err != nil {
		d.Bad = []bool{}
	}
	for _, b := range bad {
		d.Bad = append(d.Bad, b != 0)
	}
	return d, err
}

// putImport encodes an import and lists its descriptors: the proof's, then the regions'.
func putImport(number uint64, im *cudaipc.Import) (msg []byte, fds []int) {
	for _, fd := range descriptors(im) {
		fds = append(fds, *fd)
	}
	return pack(nil, msgImport, number, im), fds
}

// takeImport decodes an import, which owns the descriptors unless there is an error.
func takeImport(m *message, fds []int) (im cudaipc.Import, err error) {
	if err = m.read(&im); err != nil {
		return im, err
	}
	wanted := descriptors(&im)
	if len(wanted) != len(fds) {
		return im, fmt.Errorf("import with %d descriptors of %d: %w", len(fds), len(wanted), errWire)
	}
	for i, fd := range wanted {
		*fd = fds[i]
	}
	return im, nil
}

func descriptors(im *cudaipc.Import) (all []*int) {
	if im.Proof > 0 {
		all = append(all, &im.Proof)
	}
	for i := range im.Regions {
		if r := &im.Regions[i]; r.HasFD() {
			all = append(all, &r.FD)
		}
	}
	return all
}
