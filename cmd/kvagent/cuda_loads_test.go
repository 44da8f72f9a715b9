//go:build cuda && softcuda

package main

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/engine"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// loadEngine is an engine of one rank with one region of two blocks and one to look into, which
// speaks to an agent by itself.
type loadEngine struct {
	t      *testing.T
	engine *engine.CUDA
	stream *engine.CUDAStream
	kv     *engine.CUDAMemory
	conn   *ipc.Conn
	epoch  uint32
}

const loadBlock = 1 << 20

// loadWait is how long these tests wait for an event that must come.
const loadWait = 20 * time.Second

func newLoadEngine(t *testing.T, dir string) *loadEngine {
	t.Helper()
	e := &loadEngine{t: t}
	var err error
	if e.engine, err = engine.NewCUDA(cudaipc.UUID{}, 1, 0); err != nil {
		t.Fatal(err)
	}
	if e.kv, err = e.engine.Alloc(1, 2*loadBlock); err != nil {
		t.Fatal(err)
	}
	e.stream = e.engine.NewStream()
	ctx, cancel := context.WithTimeout(t.Context(), loadWait)
	defer cancel()
	if e.conn, _, err = ipc.DialSession(ctx, filepath.Join(dir, ipc.SessionSocket), "test engine", ipc.MinVersion,
		ipc.Version); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = e.conn.Close() // the agent releases what it held
		if err := e.engine.Close(); err != nil {
			t.Error(err)
		}
	})
	e.register()
	return e
}

func (e *loadEngine) send(msg any, fds ...int) {
	e.t.Helper()
	if err := e.conn.Send(msg, fds...); err != nil {
		e.t.Fatal(err)
	}
}

// until reads messages until one is of the wanted type.
func until[T any](e *loadEngine) *T {
	e.t.Helper()
	for {
		msg, _, err := e.conn.Recv()
		if err != nil {
			e.t.Fatal(err)
		}
		if m, ok := msg.(*T); ok {
			return m
		}
	}
}

func (e *loadEngine) register() {
	e.t.Helper()
	words, sync := e.engine.SyncDesc()
	gpu, kv := e.engine.GPU(), e.kv.Regions()[0]
	e.send(&ipc.Register{
		Req: 1, Instance: "one", Role: ipc.RoleWorker, World: 1, Held: []uint32{0}, Shards: 1, HashTokens: 16,
		Identity: []ipc.Pair{{Key: "dtype", Value: "u8"}, {Key: "model", Value: "test"}, {Key: "tenant"}},
		Groups:   []ipc.GroupDesc{{BlockTokens: 16, NumBlocks: 2}}, Regions: 2, Segments: 1,
		Sync: &ipc.SyncDesc{Region: uint32(sync.Region), StepOff: sync.StepOff, EventsOff: sync.EventsOff,
			Events: sync.Events, RevokeOff: sync.RevokeOff},
	})
	e.send(&ipc.Regions{Req: 1, List: []ipc.RegionDesc{
		{ID: uint32(words.ID), Kind: ipc.RegionFD, Size: words.Size},
		{ID: 1, Kind: ipc.RegionCUDA, Size: kv.Size, Addr: kv.Addr, Handle: append(bytes.Clone(kv.Handle), gpu[:]...)},
	}}, words.FD)
	e.send(&ipc.Segments{Req: 1, List: []ipc.SegmentDesc{{Region: 1, Stride: loadBlock, Bytes: loadBlock}}})
	r := until[ipc.Registered](e)
	if r.Status != ipc.RegDone {
		e.t.Fatalf("registration refused: %s", r.Text)
	}
	e.epoch = r.Epoch
}

// section is the one block that these tests store, in a block of the engine's.
func loadSection(block byte) []ipc.Section {
	return []ipc.Section{{HashLen: 4, Hashes: []byte("hash"), Blocks: []byte{block, 0, 0, 0}}}
}

// TestCUDALoadEventsOfTheAgent asks for load events in an engine's session, saves a block, and has
// the engine's stream wait for the load of it. It expects a kernel after the wait to see the bytes,
// without asking for the load's DONE.
func TestCUDALoadEventsOfTheAgent(t *testing.T) {
	softMachine(t)
	t.Setenv("SOFTCUDA_COPY_US", "100000")
	serve, dir, log := startServe(t, "--device", "cuda", "--pool", "64MiB")
	t.Setenv("SOFTCUDA_COPY_US", "0")
	e := newLoadEngine(t, dir)
	e.send(&ipc.LoadEvents{Req: 2, Off: e.engine.LoadWords(), Count: 4})
	made := until[ipc.EventsMade](e)
	if made.Status != ipc.RegDone {
		t.Fatalf("no load events: %s\n%s", made.Text, log)
	}
	if err := e.engine.OpenLoads(made.Handles); err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte("load"), loadBlock/4)
	if _, err := e.kv.WriteAt(want, 0); err != nil {
		t.Fatal(err)
	}
	e.send(&ipc.Save{Job: 1, Epoch: e.epoch, Event: ipc.None, Revoke: ipc.None, Sections: loadSection(0)})
	if d := until[ipc.Done](e); d.Status[0] != ipc.BlockOK {
		t.Fatalf("save: %d", d.Status[0])
	}
	if e.stream.WaitLoad(6) {
		t.Fatal("a load that was not submitted is said to be recorded")
	}
	e.send(&ipc.Load{Job: 6, Epoch: e.epoch, Event: ipc.None, Sections: loadSection(1)})
	pooltest.Until(t, "the load's event is recorded", func() bool { return e.stream.WaitLoad(6) })
	got := make([]byte, loadBlock)
	seen := make(chan error, 1)
	e.stream.Launch(func() {
		_, err := e.kv.ReadAt(got, loadBlock)
		seen <- err
	})
	if err := <-seen; err != nil || !bytes.Equal(got, want) {
		t.Fatalf("behind the wait the bytes are not there: %v", err)
	}
	if d := until[ipc.Done](e); d.Job != 6 || d.Status[0] != ipc.BlockOK {
		t.Fatal(fmt.Sprint("load: ", d))
	}
	if err := e.conn.Close(); err != nil {
		t.Fatal(err)
	}
	endServe(t, serve)
}
