package s3

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/remote"
	"github.com/kvagent/kvagent/pool/servertest"
)

// liar is a server that answers like an S3, but one of its answers is something else, and ends the
// connection.
type liar struct {
	mu      sync.Mutex
	objects map[string]string
	honest  int // answers before the lie; negative: it has lied
	lie     func(w io.Writer)
}

func (s *liar) serve(nc net.Conn) {
	in := bufio.NewReader(nc)
	for {
		r, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		if strings.HasPrefix(r.Header.Get("X-Amz-Content-Sha256"), "STREAMING") {
			r.Body = io.NopCloser(httputil.NewChunkedReader(r.Body)) // signatures are extensions of the chunks
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		s.mu.Lock()
		s.honest--
		lies := s.honest == -1
		w := httptest.NewRecorder()
		if !lies {
			s.answer(w, r, string(body))
		}
		answer := w.Result()
		answer.ContentLength = int64(w.Body.Len())
		if r.Method == http.MethodHead {
			answer.Request, answer.ContentLength = r, int64(len(s.objects[r.URL.Path]))
		}
		s.mu.Unlock()
		if lies {
			s.lie(nc)
			return
		}
		if answer.Write(nc) != nil {
			return
		}
	}
}

func (s *liar) answer(w *httptest.ResponseRecorder, r *http.Request, body string) {
	object, there := s.objects[r.URL.Path]
	w.Header().Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
	w.Header().Set("ETag", `"e"`)
	switch {
	case r.URL.Query().Has("location"):
		_, _ = w.WriteString("<LocationConstraint/>")
	case r.Method == http.MethodPut && there:
		w.WriteHeader(http.StatusPreconditionFailed)
	case r.Method == http.MethodPut:
		s.objects[r.URL.Path] = body
	case !there:
		w.WriteHeader(http.StatusNotFound)
	case r.Method == http.MethodDelete:
		delete(s.objects, r.URL.Path)
		w.WriteHeader(http.StatusNoContent)
	case r.Method == http.MethodGet:
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader(object))
	}
}

// endless writes a head and then a part again and again, as long as anything reads it.
func endless(head, part string) func(io.Writer) {
	return func(w io.Writer) {
		_, err := io.WriteString(w, head)
		for part := bytes.Repeat([]byte(part), 1+(64<<10)/len(part)); err == nil; {
			_, err = w.Write(part)
		}
	}
}

func once(text string) func(io.Writer) {
	return func(w io.Writer) { _, _ = io.WriteString(w, text) }
}

const (
	ok    = "HTTP/1.1 200 OK\r\nLast-Modified: Mon, 02 Jan 2006 15:04:05 GMT\r\n"
	sized = ok + "Content-Length: 9223372036854775807\r\n\r\n"
)

// lies are answers without an end, and some that mean something else.
func lies() (all []func(io.Writer)) {
	for _, l := range [][2]string{
		{sized, "x"}, {ok + "\r\n", "x"}, {ok + "Transfer-Encoding: chunked\r\n\r\n", "4\r\nabcd\r\n"},
		{ok + "Transfer-Encoding: chunked\r\n\r\n0\r\n", "A: b\r\n"},
		{ok + "Transfer-Encoding: chunked\r\n\r\n1;", "x"},
		{ok, "X-Amz-Meta-A: b\r\n"}, {ok + "X: ", "x"}, {"", "x"}, {"HTTP/1.1 200 ", "x"},
		{"", "HTTP/1.1 103 Early\r\n\r\n"},
		{sized + "<ListBucketResult>", "<Contents/>"},
		{sized + "<ListBucketResult>", "<Contents><Key>x</Key></Contents>"},
		{sized + "<ListBucketResult><Contents><Key>", "x"}, {sized, "<x>"}, {sized + "<x ", "a='b' "},
		{sized + "<!--", "-"},
		{sized + "<ListBucketResult><Contents><UserMetadata>", "<a>b</a>"}, {sized + "<LocationConstraint>", "x"},
		{"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-1/99\r\n\r\n", "x"},
		{"HTTP/1.1 206 Partial Content\r\nContent-Encoding: gzip\r\n\r\n", "\x1f\x8b\x08"},
		{"HTTP/1.1 404 Not Found\r\n\r\n<Error><Code>", "x"},
		{"HTTP/1.1 503 Slow\r\n\r\n<Error>", "<Message>x</Message>"},
		{"HTTP/1.1 403 Forbidden\r\n\r\n", "x"}, {"HTTP/1.1 500 Error\r\n\r\n", "\r\n"},
		{"HTTP/1.1 204 No Content\r\n\r\n", "x"},
		{"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "x"}, {"HTTP/1.1 101 Switching\r\n\r\n", "x"},
	} {
		all = append(all, endless(l[0], l[1]))
	}
	for _, text := range []string{
		"", "\r\n", ok + "Content-Length: -1\r\n\r\n", ok + "Content-Length: 1\r\n\r\n",
		"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/x\r\nContent-Length: 0\r\n\r\n",
		ok + "Content-Length: 85\r\n\r\n<ListBucketResult><Contents><Key>x</Key><Size>-1</Size></Contents>" +
			"</ListBucketResult>",
		ok + "Content-Length: 97\r\n\r\n<ListBucketResult><Contents><Key>kvagent/%</Key></Contents>" +
			"<EncodingType>url</EncodingType></ListBucketResult>",
		"HTTP/1.1 400 Bad\r\nContent-Length: 82\r\n\r\n" +
			"<Error><Code>AuthorizationHeaderMalformed</Code><Region>../../x y</Region></Error>",
	} {
		all = append(all, once(text))
	}
	return all
}

// believe makes each call to a store one of whose answers is a lie, and expects the store to serve
// after it without having taken much memory.
func believe(t *testing.T, honest int, lie func(io.Writer)) {
	s := &liar{objects: map[string]string{}, honest: honest, lie: lie}
	before := servertest.Allocated()
	store := open(t, Options{
		Endpoint: servertest.Listen(t, s.serve), Insecure: true, PathStyle: true, Bucket: bucket,
		AccessKey: servertest.S3AccessKey, SecretKey: servertest.S3SecretKey, Concurrency: 2,
	})
	items, status := pooltest.Blocks(0, 1, 1<<20), make([]pool.Status, 1)
	keys := []pool.Key{items[0].Key}
	pooltest.Until(t, "the server has lied", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_ = store.Put(ctx, items)
		_ = store.Get(ctx, pooltest.Empty(items))
		_ = store.Exists(ctx, keys, status)
		_ = store.Delete(ctx, keys)
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.honest < 0
	})
	if took := servertest.Allocated() - before; took > servertest.MaxAllocated {
		t.Errorf("after %d answers: %d bytes were allocated", honest, took)
	}
	items = pooltest.Blocks(10, 1, 1<<20) // the server may have said of another that it stored it
	pooltest.Until(t, "the store serves again", func() bool {
		return store.Put(t.Context(), items) == nil && store.Get(t.Context(), pooltest.Empty(items)) == nil &&
			store.State() == remote.OK
	})
	pooltest.Want(t, store, pool.OK, items...)
}

// answersOfAll is how many answers all calls of believe take.
const answersOfAll = 12

// TestServerLies gives wrong answers, each in place of some right ones.
func TestServerLies(t *testing.T) {
	every := 4
	if testing.Short() {
		every = 3 * answersOfAll
	}
	for i, lie := range lies() {
		for honest := range answersOfAll {
			if (i+5*honest)%every != 0 {
				continue
			}
			t.Run(fmt.Sprint(i, " ", honest), func(t *testing.T) { believe(t, honest, lie) })
		}
	}
}

// FuzzServer is the same for anything, which may be repeated without an end.
func FuzzServer(f *testing.F) {
	f.Add(byte(3), ok, "X: y\r\n")
	f.Add(byte(0), "HTTP/1.1 200 OK\r\n\r\n<x>", "")
	f.Fuzz(func(t *testing.T, honest byte, head, part string) {
		if part == "" {
			believe(t, int(honest)%answersOfAll, once(head))
		} else {
			believe(t, int(honest)%answersOfAll, endless(head, part))
		}
	})
}

// TestLostAfterTooLong expects a store to be lost after an answer that is longer than what was
// asked for, and to say so.
func TestLostAfterTooLong(t *testing.T) {
	s := &liar{objects: map[string]string{}, lie: endless("HTTP/1.1 404 Not Found\r\n\r\n", "x")}
	store := open(t, Options{
		Endpoint: servertest.Listen(t, s.serve), Insecure: true, PathStyle: true, Bucket: bucket, Region: "us-east-1",
		AccessKey: servertest.S3AccessKey, SecretKey: servertest.S3SecretKey,
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := store.Get(ctx, pooltest.Blocks(0, 1, 100))
	if err == nil || !strings.Contains(err.Error(), remote.ErrAnswer.Error()) || store.State() != remote.Lost {
		t.Errorf("%v, state %v, want lost: %s", err, store.State(), strconv.Quote(remote.ErrAnswer.Error()))
	}
}

// TestCredentialsAreBounded expects the service that names the machine's role not to be read
// without an end.
func TestCredentialsAreBounded(t *testing.T) {
	s := &liar{lie: endless(ok+"\r\n{\"Code\": \"", "x")}
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://"+servertest.Listen(t, s.serve)+"/")
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SECRET_KEY"} {
		t.Setenv(name, "")
	}
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", t.TempDir()+"/none")
	before := servertest.Allocated()
	store := open(t, Options{Endpoint: "127.0.0.1:1", Insecure: true, Bucket: bucket, Region: "us-east-1"})
	_ = store.Get(t.Context(), pooltest.Blocks(0, 1, 100))
	s.mu.Lock()
	defer s.mu.Unlock()
	if took := servertest.Allocated() - before; took > servertest.MaxAllocated || s.honest >= 0 {
		t.Errorf("%d bytes were allocated, %d answers", took, -s.honest)
	}
}
