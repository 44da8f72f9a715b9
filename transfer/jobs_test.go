package transfer

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// TestJobsThatCannotBe expects each impossible job to be refused with an error that says where, and
// the worker to continue.
func TestJobsThatCannotBe(t *testing.T) {
	s := newNode(t, 64).join(t, nil)
	one := func(change func(*Section)) Job {
		sec := section(0, 4, 0)
		change(&sec)
		return load(1, section(0, 1, 9), sec)
	}
	for _, try := range []struct {
		where string
		job   Job
	}{
		{"sections[1].group: 1 is not below 1", one(func(s *Section) { s.Group = 1 })},
		{"sections[1].blocks[2]: 256 is not below 256", one(func(s *Section) { s.Blocks[2] = blocks })},
		{"sections[1].blocks[3]: 4294967295", one(func(s *Section) { s.Blocks[3] = math.MaxUint32 })},
		{"group 0: block 1 is there twice", one(func(s *Section) { s.Blocks[3] = 1 })},
		{"group 0: block 9 is there twice", one(func(s *Section) { s.Blocks[0] = 9 })},
	} {
		err := s.worker.Submit(try.job)
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), try.where) {
			t.Errorf("%v; want ErrInvalid that says %q", err, try.where)
		}
	}
	if c := s.finish(load(1, section(0, 4, 1)), pool.Missing); len(c.Status) != 4 {
		t.Error(len(c.Status))
	}
}

func TestNumberInUse(t *testing.T) {
	s := newNode(t, 64).join(t, nil)
	letGo := s.hold(func() {})
	s.stream.Record(0)
	job := save(1, section(0, 1, 0))
	job.Event = 0
	s.submit(job)
	if err := s.worker.Submit(save(1, section(5, 1, 0))); !errors.Is(err, ErrInvalid) {
		t.Errorf("a number that is in use: %v, want ErrInvalid", err)
	}
	letGo()
	s.ends(1, pool.OK)
	s.finish(save(1, section(5, 1, 0)), pool.OK)
}

// TestLargestJob has as many blocks and sections as there may be.
func TestLargestJob(t *testing.T) {
	s := newNode(t, 64).join(t, nil)
	var sections []Section
	for i := range ipc.MaxSections {
		sec := section(i*128, 128, 0)
		sections = append(sections, sec)
	}
	s.submit(save(1, sections...))
	c := s.completion()
	if len(c.Status) != ipc.MaxJobBlocks {
		t.Fatalf("%d statuses, want %d", len(c.Status), ipc.MaxJobBlocks)
	}
	for i, status := range c.Status {
		if status != pool.OK && status != pool.Busy {
			t.Fatalf("block %d: status %d", i, status)
		}
	}
	s.finish(save(2), pool.OK) // none is a job too
}

// TestTheSameTwiceInOneJob expects a key that is twice in a save to be stored once, and one that is
// twice in a load to fill two blocks.
func TestTheSameTwiceInOneJob(t *testing.T) {
	s := newNode(t, 64).join(t, nil)
	s.write(1, 1)
	s.submit(save(1, section(0, 1, 1), section(0, 1, 1)))
	c := s.completion()
	if c.Status[0] != pool.OK || c.Status[1] != pool.InProgress {
		t.Errorf("one key twice in a save: %v, want stored and in progress", c.Status)
	}
	s.finish(load(2, section(0, 1, 7), section(0, 1, 8)), pool.OK)
	s.expect(7, 1, "one key twice in a load")
	s.expect(8, 1, "one key twice in a load")
}
