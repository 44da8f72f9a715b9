package cudaipc

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"
)

func wireSeeds() [][]byte {
	im := Import{Peer: 7, Pid: 8, GPU: UUID{1, 2}, Proof: 100, Sync: &Sync{Region: 1, Events: 3}, Regions: []Region{
		{ID: 1, Kind: KindFD, Size: 4096, FD: 101}, {ID: 2, Kind: KindCUDA, Size: 1 << 30, Addr: 512, Handle: make([]byte, 64)},
	}}
	imported, _ := putImport(nil, 1, &im)
	done := Done{Sums: []uint32{1, 2}, Bad: []bool{true, false}, Err: fmt.Errorf("region 2: %w", ErrRange)}
	return [][]byte{
		imported,
		putCopy(nil, 9, &Copy{Peer: 7, Dir: Scatter, Sum: true, Serial: 1<<33 + 1, Blocks: []Block{{1, 2}}, Runs: []Run{{2, 3, 4, 5}}}),
		putPoll(nil, 3, []Wait{{Peer: 7, Event: None, Revoke: 1, Step: 1<<40 + 5}}),
		putDone(nil, 9, &done),
		putStates(nil, 3, []State{{Step: 4, Fired: true}}, nil),
		putEvents(nil, 4, 7, 4096, 2),
		putEventsAre(nil, 4, []byte{1, 2, 3}, ErrBusy),
		putSample(nil, 9, &Sample{
			Peer: 7, Within: time.Second, Pieces: []Piece{{2, 3, 4, 5}, {1, 1 << 40, 6, 7}}, Blocks: []SampleBlock{{8, 9}},
		}),
	}
}

// FuzzMoverWire: no bytes make a reader panic, and what is read is written again as the same bytes.
func FuzzMoverWire(f *testing.F) {
	for _, seed := range wireSeeds() {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, msg []byte) {
		again, err := reread(msg)
		if err == nil && !bytes.Equal(again, msg) {
			t.Errorf("read\n%x, written again\n%x", msg, again)
		}
		if err != nil && !errors.Is(err, errMoverWire) {
			t.Errorf("error %v", err)
		}
	})
}

// reread reads a message by its kind, and writes it again.
func reread(msg []byte) ([]byte, error) {
	r := &fields{rest: msg}
	kind, number := r.u8(), r.u64()
	if r.bad {
		return nil, errMoverWire
	}
	switch kind {
	case msgImport:
		for n := range 16 { // descriptors come beside the bytes: try so many
			fds := make([]int, n)
			for i := range fds {
				fds[i] = 100 + i
			}
			again := *r
			if im, err := takeImport(&again, fds); err == nil {
				b, _ := putImport(nil, number, &im)
				return b, nil
			}
		}
		return nil, errMoverWire
	case msgCopy:
		var c Copy
		err := takeCopy(r, &c)
		return putCopy(nil, Ticket(number), &c), err
	case msgSum:
		s, err := takeSample(r)
		return putSample(nil, Ticket(number), s), err
	case msgPoll:
		waits, err := takePoll(r)
		return putPoll(nil, number, waits), err
	case msgDone:
		d, err := takeDone(r)
		return putDone(nil, Ticket(number), &d), err
	case msgEvents:
		id, off, count, err := takeEvents(r)
		return putEvents(nil, number, id, off, count), err
	case msgEventsAre:
		handles, err := takeEventsAre(r)
		if errors.Is(err, errMoverWire) {
			return nil, err
		}
		return putEventsAre(nil, number, handles, err), nil
	case msgStates:
		r.error()
		states := make([]State, r.count(wireState))
		again := &fields{rest: msg[moverHead:]}
		said := takeStates(again, states)
		if errors.Is(said, errMoverWire) {
			return nil, errMoverWire
		}
		return putStates(nil, number, states, said), nil
	}
	return nil, errMoverWire
}

// TestMoverWireSeeds: the fuzz's seeds are messages, not noise.
func TestMoverWireSeeds(t *testing.T) {
	for i, seed := range wireSeeds() {
		if again, err := reread(seed); err != nil || !bytes.Equal(again, seed) {
			t.Errorf("%d: %v, %x, want %x", i, err, again, seed)
		}
	}
}
