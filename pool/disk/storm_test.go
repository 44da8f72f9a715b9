package disk

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// The kill storm: a child puts, gets and deletes, and reports through a pipe what it begins and
// what is done. The parent kills it at a random moment, opens the directory, and compares. Rounds
// use the same directory.
const (
	stormDirEnv  = "KVAGENT_DISK_STORM_DIR"
	stormSeedEnv = "KVAGENT_DISK_STORM_SEED"
	stormBytes   = 32 << 20
	stormKeys    = 560 // of 48 KiB on average: 82 % of the room
	stormWorkers = 3
)

func stormOptions(dir string) Options {
	return Options{Dirs: []Dir{{dir, stormBytes}}, SegmentBytes: 1 << 20, WriteBytes: 256 << 10}
}

func stormLength(i int) int { return 32<<10 + i*7919%(32<<10) }

// stormChild is the child's main; it never returns there.
func stormChild() bool {
	dir := os.Getenv(stormDirEnv)
	if dir == "" {
		return false
	}
	seed, err := strconv.ParseUint(os.Getenv(stormSeedEnv), 10, 64)
	if err != nil {
		panic(err)
	}
	s, err := Open(stormOptions(dir))
	if err != nil {
		panic(err)
	}
	var mu sync.Mutex
	tell := func(what string, i int) {
		mu.Lock()
		defer mu.Unlock()
		if _, err := fmt.Fprintln(os.Stdout, what, i); err != nil {
			os.Exit(0) // the parent is gone
		}
	}
	var workers sync.WaitGroup
	for w := range stormWorkers {
		workers.Go(func() { stormWork(s, w, rand.New(rand.NewPCG(seed, uint64(w))), tell) })
	}
	workers.Wait()
	return true
}

func stormWork(s *Store, w int, r *rand.Rand, tell func(string, int)) {
	ctx := context.Background()
	for {
		i := r.IntN(stormKeys/stormWorkers)*stormWorkers + w // each key has one worker
		items := []pool.Item{blockOf(i, stormLength(i))}
		switch op := r.IntN(10); {
		case op < 5:
			items[0].Data = make([]byte, stormLength(i))
			if err := s.Get(ctx, items); err != nil ||
				(items[0].Status == pool.OK && string(items[0].Data) != string(blockOf(i, stormLength(i)).Data)) {
				panic(fmt.Sprint("get: ", err, " or wrong bytes"))
			}
		case op < 9:
			tell("putting", i)
			if err := s.Put(ctx, items); err != nil {
				panic(err)
			}
			if st := items[0].Status; st == pool.OK || st == pool.Exists {
				tell("put", i)
			}
		default:
			tell("deleting", i)
			if err := s.Delete(ctx, []pool.Key{items[0].Key}); err != nil {
				panic(err)
			}
			tell("deleted", i)
		}
	}
}

func TestKillStorm(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a torture")
	}
	rounds := 20
	if text := os.Getenv("KVAGENT_KILLS"); text != "" {
		var err error
		if rounds, err = strconv.Atoi(text); err != nil {
			t.Fatalf("KVAGENT_KILLS: %v", err)
		}
	}
	st := &killStorm{
		t: t, dir: t.TempDir(), r: rand.New(rand.NewPCG(newSeed(t), 0)), last: map[int]string{}, rot: map[int]bool{},
	}
	st.fill()
	for round := range rounds {
		st.round(round%4 == 3)
	}
	ratio := float64(st.back) / float64(st.acknowledged)
	t.Logf("%d kills: %d of %d acknowledged blocks were back (%.4f), 0 wrong; recovery took %v at most; %d blocks "+
		"stored at the end; %.3f of the room was taken",
		rounds, st.back, st.acknowledged, ratio, st.slowest, st.stored, st.taken/float64(rounds))
	// 0.8 to 0.9: a kill may come when segments have just been given up for the next ones
	if mean := st.taken / float64(rounds); mean < 0.75 {
		t.Errorf("%.3f of the room was taken, on average of %d rounds, want 0.75", mean, rounds)
	}
	if ratio < 0.95 {
		t.Errorf("%.4f of the acknowledged blocks are back, want 0.95", ratio)
	}
}

type killStorm struct {
	t    *testing.T
	dir  string
	r    *rand.Rand
	last map[int]string // the last word on each key; "" is unknown
	// blocks that were damaged: they are dropped again after each start, until they are evicted or
	// put again
	rot map[int]bool

	acknowledged, back, stored int
	taken                      float64 // of the room, all rounds together
	slowest                    time.Duration
}

// fill stores every key once.
func (st *killStorm) fill() {
	s := open(st.t, stormOptions(st.dir))
	for i := range stormKeys {
		wantPut(st.t, s, i, i+1, stormLength(i))
		st.last[i] = "put"
	}
	if u := s.Usage(); u.Bytes < stormBytes*8/10 {
		st.t.Fatalf("only %d of %d bytes are used", u.Bytes, stormBytes)
	}
	closeNow(st.t, s)
}

func (st *killStorm) round(damaged bool) {
	st.kill()
	if damaged {
		damage(st.t, st.r, st.dir)
	}
	began := time.Now()
	s, err := Open(stormOptions(st.dir))
	if err != nil {
		st.t.Fatal(err)
	}
	st.slowest = max(st.slowest, time.Since(began))
	st.taken += float64(s.Usage().Bytes) / stormBytes
	st.stored = 0
	for i := range stormKeys {
		status := get(st.t, s, i, stormLength(i)) // fails on a wrong byte
		if status == pool.OK {
			st.stored++
		}
		if !damaged && !st.rot[i] {
			st.compare(i, status)
		}
		st.rot[i] = status == pool.Corrupt || (damaged && status != pool.OK)
		st.last[i] = ""
		if !damaged && status == pool.OK {
			st.last[i] = "put"
		}
	}
	closeNow(st.t, s)
}

func (st *killStorm) compare(i int, status pool.Status) {
	if st.last[i] == "put" {
		if st.acknowledged++; status == pool.OK {
			st.back++
		}
	}
	if status == pool.Corrupt {
		st.t.Errorf("block %d: nothing was damaged, and yet it does not verify", i)
	}
}

// kill runs a child for a while.
func (st *killStorm) kill() {
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), stormDirEnv+"="+st.dir, fmt.Sprint(stormSeedEnv, "=", st.r.Uint64()))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		st.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		st.t.Fatal(err)
	}
	words, lines := 1+st.r.IntN(600), bufio.NewReader(out)
	for n := 0; ; n++ {
		line, err := lines.ReadString('\n')
		if err != nil {
			if !errors.Is(err, io.EOF) {
				st.t.Fatal(err)
			}
			break
		}
		if what, number, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			i, err := strconv.Atoi(number)
			if err != nil {
				st.t.Fatalf("the child says %q", line)
			}
			st.last[i] = what
		}
		if n == words {
			if err := cmd.Process.Kill(); err != nil { // the bytes in the pipe are still read
				st.t.Fatal(err)
			}
		}
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != -1 {
		st.t.Fatalf("the child ended by itself: %v", err)
	}
}
