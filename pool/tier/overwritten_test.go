package tier

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/redis"
	"github.com/kvagent/kvagent/pool/s3"
	"github.com/kvagent/kvagent/pool/servertest"
)

// served is a store on a real server, and what another client does to its values.
type served struct {
	store  pool.Store
	damage func(t *testing.T) // changes a byte of every value
	left   func(t *testing.T) int
}

func onRedis(t *testing.T) served {
	server := servertest.Redis(t)
	host, port, _ := strings.Cut(server.Addr, ":")
	cli := func(t *testing.T, args ...string) string {
		t.Helper()
		out, err := exec.Command("redis-cli", append([]string{"-h", host, "-p", port}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("redis-cli %v: %v: %s", args, err, out)
		}
		return string(out)
	}
	s, err := redis.Open(redis.Options{Addresses: []string{server.Addr}})
	check(t, err)
	t.Cleanup(func() { check(t, s.Close()) })
	return served{
		store: s,
		damage: func(t *testing.T) {
			for _, key := range strings.Fields(cli(t, "--scan")) {
				cli(t, "SETRANGE", key, "500", "other bytes")
			}
		},
		left: func(t *testing.T) int { return len(strings.Fields(cli(t, "--scan"))) },
	}
}

func onS3(t *testing.T) served {
	server := servertest.S3(t, "blocks")
	s, err := s3.Open(s3.Options{
		Endpoint: server.Addr, Insecure: true, PathStyle: true, Region: "us-east-1", Bucket: "blocks",
		AccessKey: servertest.S3AccessKey, SecretKey: servertest.S3SecretKey,
	})
	check(t, err)
	t.Cleanup(func() { check(t, s.Close()) })
	each := func(t *testing.T, do func(path string)) (n int) {
		t.Helper()
		check(t, filepath.WalkDir(filepath.Join(server.Dir, "blocks", "kvagent"),
			func(path string, d fs.DirEntry, err error) error {
				if os.IsNotExist(err) {
					return nil
				}
				if err == nil && d.Type().IsRegular() {
					n++
					do(path)
				}
				return err
			}))
		return n
	}
	return served{
		store: s,
		damage: func(t *testing.T) {
			each(t, func(path string) {
				f, err := os.OpenFile(path, os.O_WRONLY, 0)
				check(t, err)
				_, err = f.WriteAt([]byte("other bytes"), 500)
				check(t, err)
				check(t, f.Close())
			})
		},
		left: func(t *testing.T) int { return each(t, func(string) {}) },
	}
}

// TestOverwrittenOnTheServer checks that values that another client overwrote on the server are not
// delivered. They are counted and deleted, the log names the node in their headers, and the block
// is stored again.
func TestOverwrittenOnTheServer(t *testing.T) {
	for name, open := range map[string]func(t *testing.T) served{"redis": onRedis, "s3": onS3} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			patient := Tier{Name: "shared", Store: s.store, Write: OnSave, AskWithin: patience, PutWithin: patience,
				FetchWithin: patience}
			h := chain("a", 20)
			var mu sync.Mutex
			var said []string
			log := func(_, what string, err error) {
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					what += ": " + err.Error()
				}
				said = append(said, what)
			}
			writer := newNode(t, 200, 2, Options{Node: "writer"}, patient)
			reader := newNode(t, 200, 2, Options{Node: "reader", Log: log}, patient)
			writer.waitFor("connected", func(*pool.TierReport) bool {
				anything := []pool.Key{{Hash: pool.MakeHash([]byte{1})}}
				return s.store.Exists(t.Context(), anything, make([]pool.Status, 1)) == nil
			})
			writer.save(h)
			writer.stored(0, 20)
			if got := s.left(t); got != 40 {
				t.Fatalf("%d values on the server, want 40", got)
			}
			s.damage(t)
			if got := reader.know(h); got != 20 {
				t.Fatalf("%d blocks are known, want 20", got)
			}
			_, refs := reader.settled(h)
			if got := reader.load(h); got != 0 {
				t.Errorf("%d blocks that somebody else wrote over came to memory", got)
			}
			reader.Unpin(refs)
			if r := reader.Report().Tiers[0]; r.Corrupt != 40 || r.Misses != 20 {
				t.Errorf("%d damaged, %d misses, want 40 shards of 20 blocks", r.Corrupt, r.Misses)
			}
			reader.waitFor("they are dropped", func(r *pool.TierReport) bool {
				return s.left(t) == 0 &&
					r.Tiers[0].Deleted == 40
			})
			mu.Lock()
			if text := strings.Join(said, "\n"); !strings.Contains(text, `written by "writer"`) {
				t.Errorf("the source is not named: %q", text)
			}
			mu.Unlock()
			reader.save(h)
			reader.stored(0, 20)
			reader.flush()
			if got := reader.know(h); got != 20 {
				t.Errorf("%d blocks are stored anew, want 20", got)
			}
		})
	}
}
