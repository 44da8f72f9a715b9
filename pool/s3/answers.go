package s3

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"

	"github.com/kvagent/kvagent/pool/remote"
)

// Limits of answers.
const (
	headerBytes   = 16 << 10
	documentBytes = 16 << 10 // an error, a location, credentials
	pageKeys      = 256      // that a list is asked for
	pageBytes     = pageKeys * (4 << 10)
	pageTags      = pageKeys * 40 // the library allocates 3 KiB for an object, whose tag may be alone
)

// bounded is a transport whose answers end with an error where they are longer than what was asked
// for, before the library reads that.
type bounded struct{ http.RoundTripper }

// newTransport returns a transport for answers of at most headerBytes and a body, which bounded is
// to bound. The service decides nothing about the body's encoding.
func newTransport(o *Options) *http.Transport {
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: o.DialTimeout}).DialContext,
		TLSHandshakeTimeout: o.DialTimeout, Proxy: http.ProxyFromEnvironment,
		DisableCompression: true, MaxResponseHeaderBytes: headerBytes,
	}
}

// RoundTrip implements http.RoundTripper.
func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.RoundTripper.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	a := &answer{ReadCloser: resp.Body, left: documentBytes, tags: math.MaxInt}
	if resp.StatusCode < http.StatusMultipleChoices && r.Method == http.MethodGet {
		var from, to int64
		if n, _ := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &from, &to); n == 2 {
			a.left = to - from + 1
		} else if r.URL.Query().Has("list-type") {
			a.left, a.tags = pageBytes, pageTags
		}
	}
	resp.Body = a
	return resp, nil
}

// answer is the body of an answer.
type answer struct {
	io.ReadCloser
	left int64 // bytes; negative: there were more
	tags int   // of XML
}

func (a *answer) Read(p []byte) (n int, err error) {
	if a.left >= 0 && a.tags >= 0 {
		n, err = a.ReadCloser.Read(p[:min(int64(len(p)), a.left+1)])
		a.left -= int64(n)
		a.tags -= bytes.Count(p[:n], []byte("<"))
	}
	if a.left < 0 || a.tags < 0 {
		return 0, fmt.Errorf("s3: %w: it is longer", remote.ErrAnswer)
	}
	return n, err
}
