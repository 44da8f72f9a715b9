// Package adminclient has the commands that ask a running agent, through its admin.sock.
package adminclient

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Limits of a request to an agent.
const (
	timeout  = 5 * time.Second
	maxReply = 16 << 20 // bytes
	maxLine  = 8 << 20  // bytes, of a stream: a prompt of 300,000 blocks in a recording
)

// Client asks a running agent through its admin.sock.
type Client struct {
	path   string
	client http.Client
}

// New makes a client of the agent that serves the socket directory.
func New(dir string) *Client {
	path := filepath.Join(dir, "admin.sock")
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}
	return &Client{path: path, client: http.Client{
		Timeout: timeout, Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true},
	}}
}

// Get returns the answer to a GET of path.
func (a *Client) Get(ctx context.Context, path string) ([]byte, error) {
	return a.do(ctx, http.MethodGet, path, nil)
}

// Post returns the answer to a POST of a body, which may be empty, to path.
func (a *Client) Post(ctx context.Context, path string, body []byte) ([]byte, error) {
	return a.do(ctx, http.MethodPost, path, body)
}

// Lines calls line for each line of the answer to a GET of path, until the agent ends the answer,
// ctx is done, or line returns an error. Only the beginning of the answer has a time limit.
func (a *Client) Lines(ctx context.Context, path string, line func([]byte) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	late := time.AfterFunc(timeout, func() { cancel(os.ErrDeadlineExceeded) })
	resp, err := a.request(ctx, &http.Client{Transport: a.client.Transport}, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	late.Stop()
	defer func() { _ = resp.Body.Close() }() // an error of reading is returned
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		if err := line(lines.Bytes()); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("the agent at %s broke off: %w", a.path, err)
	}
	return nil
}

func (a *Client) do(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	resp, err := a.request(ctx, &a.client, method, path, body)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }() // it was read to its end, or its error is returned
	return a.body(resp)
}

// request returns an answer whose status is OK.
func (a *Client) request(ctx context.Context, client *http.Client, method, path string, body []byte) (
	*http.Response, error,
) {
	req, err := http.NewRequestWithContext(ctx, method, "http://kvagent"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			return nil, fmt.Errorf("no agent answers at %s: %w (is kvagent serve running with this --socket-dir?)",
				a.path, op.Err)
		}
		return nil, fmt.Errorf("the agent at %s does not answer: %w", a.path, err)
	}
	if resp.StatusCode != http.StatusOK {
		defer func() { _ = resp.Body.Close() }() // the status is the error
		body, err := a.body(resp)
		if err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("%s", strings.TrimSpace(string(body)))
	}
	return resp, nil
}

// body reads an answer to its end.
func (a *Client) body(resp *http.Response) ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxReply))
	if err != nil {
		return nil, fmt.Errorf("the agent at %s broke off: %w", a.path, err)
	}
	return body, nil
}
