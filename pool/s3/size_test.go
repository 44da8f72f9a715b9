package s3

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

// metered counts the bytes of answers that are read, and may ask for whole objects where a range is
// asked for.
type metered struct {
	http.RoundTripper
	read  atomic.Int64
	whole bool
}

func (m *metered) RoundTrip(r *http.Request) (*http.Response, error) {
	if m.whole {
		r = r.Clone(r.Context())
		r.Header.Del("Range")
	}
	resp, err := m.RoundTripper.RoundTrip(r)
	if err == nil {
		resp.Body = meteredBody{resp.Body, m}
	}
	return resp, err
}

type meteredBody struct {
	io.ReadCloser
	m *metered
}

func (b meteredBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.m.read.Add(int64(n))
	return n, err
}

// TestForeignObjectsAreNotPulledIn expects an object that another client made much larger than the
// block not to be read completely, even from a service without ranges.
func TestForeignObjectsAreNotPulledIn(t *testing.T) {
	const huge, size = 256 << 20, 100_000
	server := servertest.S3(t, bucket)
	for name, whole := range map[string]bool{"ranges": false, "no ranges": true} {
		m := &metered{RoundTripper: http.DefaultTransport.(*http.Transport).Clone(), whole: whole}
		o := options(server)
		o.Transport = m
		s := open(t, o)
		it := pooltest.Block(len(name), size)
		path := filepath.Join(server.Dir, bucket, s.name(&it.Key))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, huge); err != nil {
			t.Fatal(err)
		}
		got := pooltest.Get(t, s, it)[0]
		if read := m.read.Load(); got == pool.OK || read > 2*size {
			t.Errorf("%s: status %d, %d bytes were read of an object of %d under the name of a block of %d",
				name, got, read, huge, size)
		}
		m.RoundTripper.(*http.Transport).CloseIdleConnections()
	}
}
