package s3

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/remote"
	"github.com/kvagent/kvagent/pool/servertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const bucket = "blocks"

func options(server *servertest.Server) Options {
	return Options{
		Endpoint: server.Addr, Insecure: true, PathStyle: true, Region: "us-east-1", Bucket: bucket,
		AccessKey: servertest.S3AccessKey, SecretKey: servertest.S3SecretKey,
	}
}

func open(t testing.TB, o Options) *Store {
	t.Helper()
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestStore(t *testing.T) {
	pooltest.TestStore(t, func(t testing.TB, _ ...pool.Spec) pool.Store {
		return open(t, options(servertest.S3(t, bucket)))
	})
}

func TestFaultyStore(t *testing.T) {
	pooltest.TestFaultyStore(t, func(t testing.TB, _ ...pool.Spec) pool.Store {
		s, err := fault.New(open(t, options(servertest.S3(t, bucket))), fault.Every(11, 0.04))
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}

// TestTLS uses a certificate of its own authority; without that authority the store is lost, and
// reports why.
func TestTLS(t *testing.T) {
	dir := t.TempDir()
	roots := servertest.Certificate(t, dir)
	o := options(servertest.S3(t, bucket, "--cert", filepath.Join(dir, "cert.pem"), "--key",
		filepath.Join(dir, "key.pem")))
	o.Insecure, o.TLS = false, &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	s := open(t, o)
	items := []pool.Item{pooltest.Block(1, 100), pooltest.Block(2, 3<<20)}
	pooltest.Put(t, s, pool.OK, items...)
	pooltest.Want(t, s, pool.OK, items...)
	o.TLS = nil
	stranger := open(t, o)
	if err := stranger.Put(t.Context(), items); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a service of an unknown authority: %v", err)
	}
	if r := stranger.Report(); r.State != "lost" || !strings.Contains(r.Reason, "certificate") {
		t.Errorf("it says of itself %+v", r)
	}
	o.TLS, o.Insecure = &tls.Config{MinVersion: tls.VersionTLS12}, true
	if _, err := Open(o); err == nil {
		t.Error("TLS and no TLS were accepted")
	}
}

// TestSizes stores objects of one byte and of some MiB; a second store reads them.
func TestSizes(t *testing.T) {
	server := servertest.S3(t, bucket)
	a, b := open(t, options(server)), open(t, options(server))
	var items []pool.Item
	for i, n := range []int{1, 1 << 20, 9<<20 + 17} {
		items = append(items, pooltest.Block(i, n))
	}
	pooltest.Put(t, a, pool.OK, items...)
	pooltest.Put(t, b, pool.Exists, items...)
	pooltest.Want(t, a, pool.OK, items...)
	pooltest.Want(t, b, pool.OK, items...)
}

// TestMarkersOfResetsAreNoBlocks checks that the names of blocks have a prefix that those of
// markers lack, so that a lifecycle rule can expire blocks alone.
func TestMarkersOfResetsAreNoBlocks(t *testing.T) {
	s := open(t, options(servertest.S3(t, bucket)))
	block, marker := pooltest.Block(0, 100), pooltest.Block(1, 80)
	marker.Key.Space = pool.EpochMarkers
	pooltest.Put(t, s, pool.OK, block, marker)
	pooltest.Want(t, s, pool.OK, block, marker)
	names := map[string]bool{}
	for o := range s.core.Client.ListObjects(t.Context(), bucket, minio.ListObjectsOptions{Recursive: true}) {
		names[o.Key] = true
	}
	if !names["kvagent/blocks/"+block.Key.Text()] || !names["kvagent/resets/"+marker.Key.Text()] || len(names) != 2 {
		t.Errorf("objects %v", names)
	}
}

func TestFirstWriterWins(t *testing.T) {
	server := servertest.S3(t, bucket)
	it := pooltest.Block(1, 100_000)
	var group sync.WaitGroup
	var mu sync.Mutex
	var winners [][]byte
	for w := range 8 {
		s := open(t, options(server))
		group.Go(func() {
			mine := []pool.Item{{Key: it.Key, Data: bytes.Repeat([]byte{byte(w)}, 100_000)}}
			if err := s.Put(t.Context(), mine); err != nil {
				t.Error(err)
			}
			if mine[0].Status == pool.OK {
				mu.Lock()
				defer mu.Unlock()
				winners = append(winners, mine[0].Data)
			}
		})
	}
	group.Wait()
	if len(winners) != 1 {
		t.Fatalf("%d of 8 writers were first", len(winners))
	}
	it.Data = winners[0]
	pooltest.Want(t, open(t, options(server)), pool.OK, it)
}

// TestOtherLength expects an object that another client put not to be delivered if it is shorter or
// longer than the block.
func TestOtherLength(t *testing.T) {
	server := servertest.S3(t, bucket)
	s := open(t, options(server))
	it := pooltest.Block(1, 10_000)
	for name, other := range map[string][]byte{
		"empty": {}, "cut": it.Data[:5000], "a byte more": append(bytes.Clone(it.Data), 1),
		"somebody else's file": bytes.Repeat([]byte("z"), 20_000),
	} {
		// On its own connection: after an object without bytes the server can have
		// one answer too many, 400, for what it did not read.
		if _, err := open(t, options(server)).core.Client.PutObject(t.Context(), bucket, s.name(&it.Key),
			bytes.NewReader(other), int64(len(other)), minio.PutObjectOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			pooltest.Want(t, s, pool.Corrupt, it)
			if err := s.Delete(t.Context(), []pool.Key{it.Key}); err != nil {
				t.Fatal(err)
			}
			pooltest.Put(t, s, pool.OK, it)
			pooltest.Want(t, s, pool.OK, it)
		})
	}
}

// TestServerFails stops, kills and restarts a server: every call returns when its context ends, and
// the store recovers by itself.
func TestServerFails(t *testing.T) {
	server := servertest.S3(t, bucket)
	s := open(t, options(server))
	it := pooltest.Block(1, 10_000)
	pooltest.Put(t, s, pool.OK, it)
	server.Pause()
	for range 2 {
		hung(t, s)
	}
	server.Resume()
	pooltest.Want(t, s, pool.OK, it)
	server.Kill()
	if err := s.Get(t.Context(), []pool.Item{pooltest.Block(1, 10_000)}); err == nil || s.State() != remote.Lost {
		t.Errorf("a get from a server that was killed: %v, state %v", err, s.State())
	}
	server.Restart()
	pooltest.Want(t, s, pool.OK, it)
	if s.State() != remote.OK {
		t.Errorf("state %v, want ok", s.State())
	}
}

// hung makes each call to a stopped server, with a deadline.
func hung(t *testing.T, s *Store) {
	t.Helper()
	const limit, slack = 50 * time.Millisecond, 5 * time.Second // slack is for a busy machine
	for name, call := range map[string]func(context.Context) error{
		"put": func(ctx context.Context) error {
			return s.Put(ctx, []pool.Item{pooltest.Block(7, 10_000), pooltest.Block(8, 10_000)})
		},
		"get": func(ctx context.Context) error { return s.Get(ctx, []pool.Item{pooltest.Block(1, 10_000)}) },
		"exists": func(ctx context.Context) error {
			return s.Exists(ctx, []pool.Key{pooltest.Block(1, 1).Key}, make([]pool.Status, 1))
		},
		"delete": func(ctx context.Context) error { return s.Delete(ctx, []pool.Key{pooltest.Block(9, 1).Key}) },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		start := time.Now()
		err := call(ctx)
		took := time.Since(start)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || took > limit+slack {
			t.Errorf("%s of a stopped server: %v after %v, want the context's end after %v", name, err, took, limit)
		}
	}
}

func TestDenied(t *testing.T) {
	server := servertest.S3(t, bucket)
	o := options(server)
	o.SecretKey = "a-wrong-one"
	s := open(t, o)
	pooltest.Put(t, s, pool.Busy, pooltest.Block(1, 10))
	if s.State() != remote.Denied || s.count[countDenied].Load() == 0 {
		t.Errorf("state %v, %+v", s.State(), s.Report())
	}
	o = options(server)
	o.Bucket = "another"
	s = open(t, o)
	pooltest.Want(t, s, pool.Busy, pooltest.Block(1, 10))
	if s.State() != remote.Denied {
		t.Errorf("no such bucket: state %v, want denied", s.State())
	}
}

// mayNot answers as S3 does to keys that may not list the bucket, 403 for what is not there; or to
// keys that may do nothing.
type mayNot struct {
	http.RoundTripper
	anything atomic.Bool
}

func (m *mayNot) RoundTrip(r *http.Request) (*http.Response, error) {
	w, err := m.RoundTripper.RoundTrip(r)
	if err != nil || !m.anything.Load() && w.StatusCode != http.StatusNotFound {
		return w, err
	}
	w.Body.Close()
	w.StatusCode, w.Status, w.Body = http.StatusForbidden, "403 Forbidden", http.NoBody
	if r.Method != http.MethodHead {
		w.Body = readCloser{strings.NewReader(`<?xml version="1.0"?><Error>` +
			`<Code>AccessDenied</Code><Message>Access Denied</Message></Error>`)}
	}
	w.ContentLength = -1
	w.Header = http.Header{"Content-Type": {"application/xml"}}
	return w, nil
}

// TestKeysMayNotList expects keys that may not list the bucket to get misses, which is reported
// once, and keys without any right to be denied, as before the first success.
func TestKeysMayNotList(t *testing.T) {
	o := options(servertest.S3(t, bucket))
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	keys := &mayNot{RoundTripper: transport}
	var told []string
	o.Transport, o.OnState = keys, func(from, to remote.State, reason error) {
		told = append(told, fmt.Sprint(from, " ", to, " ", reason == errHidden))
	}
	s := open(t, o)
	absent := func(want remote.State, hidden uint64, why string) {
		t.Helper()
		status := []pool.Status{pool.OK}
		if err := s.Exists(t.Context(), []pool.Key{pooltest.Block(9, 1).Key}, status); err != nil ||
			status[0] != pool.Missing {
			t.Errorf("%s: exists: %v, %v", why, status, err)
		}
		got := map[bool]pool.Status{true: pool.Busy, false: pool.Missing}[want == remote.Denied]
		pooltest.Want(t, s, got, pooltest.Block(9, 1000))
		if s.State() != want || s.count[countHidden].Load() != hidden {
			t.Errorf("%s: state %v, want %v, %+v", why, s.State(), want, s.Report())
		}
	}
	it := pooltest.Block(1, 1000)
	absent(remote.Denied, 0, "nothing was done with the keys yet")
	pooltest.Put(t, s, pool.OK, it)
	absent(remote.OK, 2, "they may put")
	pooltest.Want(t, s, pool.OK, it)
	absent(remote.OK, 4, "and get")
	keys.anything.Store(true)
	pooltest.Put(t, s, pool.Busy, pooltest.Block(2, 1000))
	absent(remote.Denied, 4, "they may do nothing now")
	keys.anything.Store(false)
	pooltest.Want(t, s, pool.OK, it)
	absent(remote.OK, 6, "they may again")
	if got, want := strings.Join(told,
		", "), "ok denied false, denied ok false, ok ok true, ok denied false, denied ok false"; got != want {
		t.Errorf("told %q, want %q", got, want)
	}
}

// overloaded answers 503 to reads of one object, as S3 does to many requests.
type overloaded struct {
	http.RoundTripper
	object atomic.Pointer[string]
}

func (o *overloaded) RoundTrip(r *http.Request) (*http.Response, error) {
	w, err := o.RoundTripper.RoundTrip(r)
	if name := o.object.Load(); err == nil && name != nil && strings.HasSuffix(r.URL.Path, *name) {
		w.Body.Close()
		w.StatusCode, w.Status, w.ContentLength = http.StatusServiceUnavailable, "503 Slow Down", -1
		w.Body, w.Header = http.NoBody, http.Header{}
	}
	return w, err
}

// TestRefusedIsNotMissing expects an object that the service does not return, though it has it, not
// to be taken for one that is gone: the caller would delete the block's other shards.
func TestRefusedIsNotMissing(t *testing.T) {
	o := options(servertest.S3(t, bucket))
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	service := &overloaded{RoundTripper: transport}
	o.Transport = service
	s := open(t, o)
	items := pooltest.Blocks(0, 3, 1000)
	pooltest.Put(t, s, pool.OK, items...)
	name := s.name(&items[1].Key)
	service.object.Store(&name)
	if got := pooltest.Get(t, s, items...); !slices.Equal(got, []pool.Status{pool.OK, pool.Busy, pool.OK}) {
		t.Errorf("status %v, want OK, Busy, OK", got)
	}
	service.object.Store(nil)
	pooltest.Want(t, s, pool.OK, items...)
}

// notConditional answers as a service that does not support If-None-Match.
type notConditional struct{ http.RoundTripper }

func (n notConditional) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodPut && r.Header.Get("If-None-Match") != "" {
		if r.Body != nil {
			r.Body.Close()
		}
		body := `<?xml version="1.0"?><Error><Code>NotImplemented</Code>` +
			`<Message>A header implies functionality that is not implemented</Message></Error>`
		w := &http.Response{StatusCode: http.StatusNotImplemented,
			Header: http.Header{"Content-Type": {"application/xml"}}, Request: r, ProtoMajor: 1, ProtoMinor: 1}
		w.Body = http.NoBody
		w.Body = readCloser{strings.NewReader(body)}
		return w, nil
	}
	return n.RoundTripper.RoundTrip(r)
}

type readCloser struct{ *strings.Reader }

func (readCloser) Close() error { return nil }

func TestServiceWithoutConditions(t *testing.T) {
	o := options(servertest.S3(t, bucket))
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	o.Transport = notConditional{transport}
	s := open(t, o)
	pooltest.Put(t, s, pool.OK, pooltest.Block(1, 1000))
	pooltest.Put(t, s, pool.Exists, pooltest.Block(1, 1000))
	pooltest.Want(t, s, pool.OK, pooltest.Block(1, 1000))
	if !s.plain.Load() {
		t.Error("it is not said that the service knows no conditions")
	}
}

func TestOptions(t *testing.T) {
	good := Options{Bucket: bucket, AccessKey: "a", SecretKey: "b"}
	for name, change := range map[string]func(*Options){
		"Bucket":    func(o *Options) { o.Bucket = "UPPER" },
		"Prefix":    func(o *Options) { o.Prefix = "/x" },
		"Endpoint":  func(o *Options) { o.Endpoint = "https://x" },
		"SecretKey": func(o *Options) { o.SecretKey = "" },
	} {
		o := good
		change(&o)
		if _, err := Open(o); err == nil || !strings.Contains(err.Error(), name) ||
			!strings.Contains(err.Error(), "allowed") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestBucketGoes expects a deleted bucket to refuse reads and writes without failing the caller,
// and the store to recover by itself when it is back.
func TestBucketGoes(t *testing.T) {
	server := servertest.S3(t, bucket)
	s := open(t, options(server))
	pooltest.Put(t, s, pool.OK, pooltest.Block(1, 1000))
	where := filepath.Join(server.Dir, bucket)
	if err := os.RemoveAll(where); err != nil {
		t.Fatal(err)
	}
	pooltest.Want(t, s, pool.Busy, pooltest.Block(1, 1000))
	pooltest.Put(t, s, pool.Busy, pooltest.Block(2, 1000))
	status := []pool.Status{pool.OK}
	if err := s.Exists(t.Context(), []pool.Key{pooltest.Block(1, 1).Key}, status); err != nil ||
		status[0] != pool.Missing {
		t.Errorf("exists: %v, %v", status, err)
	}
	if s.State() != remote.Denied {
		t.Errorf("state %v, want denied", s.State())
	}
	if err := os.Mkdir(where, 0o755); err != nil {
		t.Fatal(err)
	}
	pooltest.Put(t, s, pool.OK, pooltest.Block(1, 1000))
	pooltest.Want(t, s, pool.OK, pooltest.Block(1, 1000))
	if s.State() != remote.OK {
		t.Errorf("state %v, want ok", s.State())
	}
}

// TestKeysChange expects requests to be refused after the keys changed at the service, and the
// store to recover with the old keys.
func TestKeysChange(t *testing.T) {
	server := servertest.S3(t, bucket)
	var mu sync.Mutex
	var told []string
	o := options(server)
	o.OnState = func(_, to remote.State, reason error) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, fmt.Sprint(to, " ", reason))
	}
	s := open(t, o)
	it := pooltest.Block(1, 1000)
	pooltest.Put(t, s, pool.OK, it)
	server.Setenv("ROOT_SECRET_KEY", "another-secret")
	server.Restart()
	pooltest.Want(t, s, pool.Busy, it)
	pooltest.Put(t, s, pool.Busy, pooltest.Block(2, 1000))
	if s.State() != remote.Denied {
		t.Errorf("state %v, want denied", s.State())
	}
	server.Setenv("ROOT_SECRET_KEY", servertest.S3SecretKey)
	server.Restart()
	pooltest.Want(t, s, pool.OK, it)
	if s.State() != remote.OK {
		t.Errorf("state %v, want ok", s.State())
	}
	mu.Lock()
	defer mu.Unlock()
	if text := strings.Join(told, "; "); strings.Contains(text, servertest.S3SecretKey) ||
		strings.Contains(text, "another-secret") || !strings.HasPrefix(text, "denied") {
		t.Errorf("told %q, want denied first, and no secret", text)
	}
}
