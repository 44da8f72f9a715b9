package mover

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

func wireSeeds() [][]byte {
	im := cudaipc.Import{Pid: 8, GPU: cudaipc.UUID{1, 2}, Proof: 100,
		Sync: &cudaipc.Sync{Region: 1, Events: 3}, Regions: []cudaipc.Region{
			{ID: 1, Kind: cudaipc.KindFD, Size: 4096, FD: 101},
			{ID: 2, Kind: cudaipc.KindCUDA, Size: 1 << 30, Addr: 512, Handle: make([]byte, 64)},
		}}
	imported, _ := putImport(1, &im)
	done := cudaipc.Done{
		Sums: []uint32{1, 2},
		Bad:  []bool{true, false},
		Err:  fmt.Errorf("region 2: %w", cudaipc.ErrRange), SumTime: time.Second,
	}
	return [][]byte{
		imported,
		putCopy(nil, 9, 7, &cudaipc.Copy{
			Dir:    cudaipc.Scatter,
			Sum:    true,
			Blocks: []cudaipc.Block{{Runs: 1, Seed: 2}},
			Runs:   []cudaipc.Run{{Region: 2, RegionOff: 3, ArenaOff: 4, Len: 5}},
		}),
		pack(nil, msgPoll, 3, &pollHead{7, cudaipc.Wait{Event: cudaipc.None, Revoke: 1, Step: 1<<40 + 5}}),
		putDone(9, &done),
		pack(nil, msgAnswer, 3, &answer{State: cudaipc.State{Step: 4, Fired: true}}),
		pack(nil, msgAnswer, 3, &answer{Err: carried(fmt.Errorf("no: %w", cudaipc.ErrPeer))}),
		pack(nil, msgSum, 9, &sumHead{7, &cudaipc.Sample{
			Within: time.Second, Blocks: []cudaipc.SampleBlock{{Block: 8, Seed: 9}},
			Pieces: []cudaipc.Piece{
				{Region: 2, Offset: 3, Stride: 4, Bytes: 5}, {Region: 1, Offset: 1 << 40, Stride: 6, Bytes: 7},
			},
		}}),
	}
}

// FuzzMoverWire expects that no bytes make a reader panic, and that a message that was read and
// written is read and written as the same bytes. JSON has several forms of one message.
func FuzzMoverWire(f *testing.F) {
	for _, seed := range wireSeeds() {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, msg []byte) {
		once, err := reread(msg)
		if err == nil {
			var twice []byte
			if twice, err = reread(once); err == nil && !bytes.Equal(twice, once) {
				t.Errorf("read\n%x, written again\n%x", once, twice)
			}
		}
		if err != nil && !errors.Is(err, errWire) {
			t.Errorf("error %v", err)
		}
	})
}

// reread reads a message by its kind, and writes it again.
func reread(msg []byte) ([]byte, error) {
	m, err := unpack(msg)
	if err != nil {
		return nil, err
	}
	same := func(v any) ([]byte, error) {
		err := m.read(v)
		return pack(nil, m.kind, m.number, v), err
	}
	switch m.kind {
	case msgImport:
		for n := range 16 { // descriptors come beside the bytes: try so many
			fds := make([]int, n)
			for i := range fds {
				fds[i] = 100 + i
			}
			if im, err := takeImport(&m, fds); err == nil {
				b, _ := putImport(m.number, &im)
				return b, nil
			}
		}
		return nil, errWire
	case msgCopy:
		var c cudaipc.Copy
		peer, err := takeCopy(&m, &c)
		return putCopy(nil, m.number, peer, &c), err
	case msgSum:
		return same(&sumHead{Sample: &cudaipc.Sample{}})
	case msgPoll:
		return same(new(pollHead))
	case msgDone:
		d, err := takeDone(&m)
		return putDone(m.number, &d), err
	case msgAnswer:
		return same(new(answer))
	}
	return nil, errWire
}

// TestMoverWireSeeds expects the fuzz's seeds to be messages, not noise.
func TestMoverWireSeeds(t *testing.T) {
	for i, seed := range wireSeeds() {
		if again, err := reread(seed); err != nil || !bytes.Equal(again, seed) {
			t.Errorf("%d: %v, %x, want %x", i, err, again, seed)
		}
	}
}

// TestMoverWireBounds expects that no message is read whose head is cut, or counts more than the
// message has, and that every byte but 0 marks a block as bad.
func TestMoverWireBounds(t *testing.T) {
	refused := func(what string, msg []byte) {
		if _, err := reread(msg); !errors.Is(err, errWire) {
			t.Errorf("%s: %v", what, err)
		}
	}
	good := cudaipc.Done{Sums: []uint32{1, 2}}
	noCopy, noDone := putCopy(nil, 9, 7, &cudaipc.Copy{}), putDone(9, &cudaipc.Done{})
	for _, whole := range [][]byte{noCopy, noDone, putDone(9, &good)} {
		for n := range whole {
			refused(fmt.Sprintf("message %d cut to %d of %d bytes", whole[0], n, len(whole)), whole[:n])
		}
	}
	for at := fixedBytes + 8; at < fixedBytes+16; at += 4 { // the counts
		for _, count := range []uint32{3, 1 << 20, 1<<32 - 1} {
			for _, msg := range [][]byte{putCopy(nil, 9, 7, &cudaipc.Copy{}), putDone(9, &good)} {
				binary.LittleEndian.PutUint32(msg[at:], count)
				refused(fmt.Sprintf("message %d with %d at %d", msg[0], count, at), msg)
			}
		}
	}
	for _, bad := range [][]bool{{}, {true, false, true}} {
		msg := putDone(9, &cudaipc.Done{Bad: bad, Err: cudaipc.ErrPeer})
		if len(bad) > 0 {
			msg[len(msg)-1] = 2
		}
		m, err := unpack(msg)
		if err != nil {
			t.Fatal(err)
		}
		d, err := takeDone(&m)
		if err != nil || d.Bad == nil || !slices.Equal(d.Bad, bad) || !errors.Is(d.Err, cudaipc.ErrPeer) {
			t.Errorf("%v was read as %v, %v: %v", bad, d.Bad, d.Err, err)
		}
	}
}
